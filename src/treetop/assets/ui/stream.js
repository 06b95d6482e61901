// What the page asks of its own server: JSON, events of a stream, the load.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the server says ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* no JSON: the status has to do */ }
  throw new ApiError(response.status, message);
}

export async function models(key) {
  return (await checked(await fetch("v1/models", { headers: headers(key) }))).json();
}

export async function post(path, body, key, signal) {
  const given = { ...headers(key), "Content-Type": "application/json" };
  return checked(await fetch(path, { method: "POST", headers: given, body: JSON.stringify(body), signal }));
}

// The objects of a stream of server-sent events, until [DONE]. Throws what the server tells as an error.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "the connection ended before the answer did");
    const parts = (waiting + value).split("\n\n");
    waiting = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(0, event.error.message);
      yield event;
    }
  }
}

const GAUGES = {
  running: "treetop:num_requests_running",
  waiting: "treetop:num_requests_waiting",
  kv: "treetop:kv_cache_usage_perc",
};

// Requests that run and wait, and the share of KV pages in use, of /metrics; null where it has none.
export async function load() {
  const text = await (await checked(await fetch("metrics"))).text();
  const found = {};
  for (const [name, metric] of Object.entries(GAUGES)) {
    const line = text.split("\n").find((each) => each.startsWith(`${metric}{`) || each.startsWith(`${metric} `));
    found[name] = line ? Number(line.slice(line.lastIndexOf(" ") + 1)) : null;
  }
  return found;
}

// The same request for a shell. The key is not shown: it comes from the environment.
export function curl(base, path, body, hasKey) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const key = hasKey ? ' \\\n  -H "Authorization: Bearer $TREETOP_API_KEY"' : "";
  const json = JSON.stringify(body, null, 2);
  return `curl -N ${base}${path} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quoted(json)}`;
}
