// The page: settings, conversation, the round that is chosen, the load of the server.

import { Answer, DEEPEST } from "./answer.js";
import { ApiError, curl, events, load, models, post } from "./stream.js";
import { draw, make, table } from "./tree.js";

const KEY = "treetop-key";
const LOAD_MS = 3000;
const at = (id) => document.getElementById(id);
const NO_TREES = "This server tells no trees: it decodes without a draft head, or with --mock-engine.";

const state = {
  key: sessionStorage.getItem(KEY) ?? "",
  model: null, // of /v1/models
  messages: [], // of the conversation so far
  running: null, // AbortController of the answer that is coming
  chosen: null, // {answer, number}
};

const isChat = () => state.model?.treetop?.chat ?? true;
const hasTrees = () => state.model?.treetop?.draft_trees ?? false;
const name = () => state.model.id.split("/").at(-1); // of a folder or a hub's id
const path = () => (isChat() ? "v1/chat/completions" : "v1/completions");

function say(words) {
  at("status").textContent = words;
}

// ------------------------------------------------------------------ connecting

async function connect() {
  try {
    state.model = (await models(state.key)).data[0];
  } catch (error) {
    const asks = error instanceof ApiError && error.status === 401;
    at("model").textContent = asks ? "needs an API key" : "no connection";
    at("key-form").hidden = !asks;
    if (asks) {
      at("key-error").textContent = state.key ? error.message : "";
      at("key").focus();
    } else setTimeout(connect, LOAD_MS);
    return;
  }
  at("key-form").hidden = true;
  at("model").textContent = name();
  at("model").title = state.model.id;
  document.title = `${name()} \u00b7 treetop`;
  const words = isChat() ? "Message" : "Text to go on with";
  at("prompt-label").textContent = at("prompt").placeholder = words;
  at("system-row").hidden = !isChat();
  at("new").textContent = isChat() ? "New chat" : "Clear";
  if (!isChat()) at("empty-words").textContent = "This model has no chat template (--chat-template): it completes text. Each"
    + " token is coloured by the depth of the draft it came from; choose one to see the tree of its round.";
  showCurl();
  at("prompt").focus();
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = at("key").value.trim();
  sessionStorage.setItem(KEY, state.key);
  connect();
});

async function showLoad() {
  if (document.hidden) return;
  try {
    const { running, waiting, kv } = await load();
    const parts = [`${running ?? 0} running`, `${waiting ?? 0} waiting`];
    if (kv !== null) parts.push(`KV ${Math.round(100 * kv)}%`);
    at("load").textContent = parts.join(" \u00b7 ");
  } catch {
    at("load").textContent = "load unknown";
  }
}

// ------------------------------------------------------------------ asking

function numberOf(id) {
  const text = at(id).value.trim();
  return text === "" ? undefined : Number(text);
}

function bodyOf(text) {
  const options = { model: state.model?.id, max_tokens: numberOf("max-tokens"), temperature: numberOf("temperature"),
    seed: numberOf("seed"), stream: true, stream_options: { include_usage: true }, return_token_ids: true,
    return_draft_depths: true, return_draft_trees: hasTrees() || undefined };
  if (!isChat()) return { prompt: text, ...options };
  const system = at("system").value.trim();
  const before = system ? [{ role: "system", content: system }] : [];
  return { messages: [...before, ...state.messages, { role: "user", content: text }], ...options };
}

function showCurl(body = bodyOf(at("prompt").value)) {
  at("curl").textContent = curl(new URL(".", document.baseURI), path(), body, state.key !== "");
}

function turn(kind, name) {
  const element = make("article", { class: `turn ${kind}` }, make("h3", {}, name));
  at("log").append(element);
  at("empty").hidden = true;
  return element;
}

function nearEnd() {
  const log = at("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

function busy(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
  at("log").setAttribute("aria-busy", String(is));
}

async function send(text) {
  const body = bodyOf(text);
  showCurl(body);
  state.running = new AbortController();
  busy(true);
  let element;
  if (isChat()) {
    turn("user", "You").append(make("div", { class: "said" }, text));
    element = turn("answer", name());
  } else {
    element = turn("completion", "Completion");
    element.append(make("div", { class: "given" }, text));
  }
  const answer = new Answer(element, choose);
  at("log").scrollTop = at("log").scrollHeight;
  say("The answer is coming.");
  let error = null;
  try {
    const response = await post(path(), body, state.key, state.running.signal);
    for await (const event of events(response)) {
      const follows = nearEnd();
      for (const choice of event.choices) answer.add(choice);
      if (event.metrics) answer.metrics(event.metrics);
      if (follows) at("log").scrollTop = at("log").scrollHeight;
    }
  } catch (raised) {
    if (raised.name === "AbortError") answer.finished = "stopped";
    else error = raised.message;
    if (raised.status === 401) connect();
  }
  answer.end(error);
  if (!error || answer.content) {
    state.messages.push({ role: "user", content: text }, { role: "assistant", content: answer.content });
  } else at("prompt").value ||= text;
  say(error ? `Error: ${error}` : `The answer has ended: ${answer.tell()}`);
  state.running = null;
  busy(false);
  showRound();
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value;
  if (!text.trim() || state.running || !state.model) return;
  at("prompt").value = "";
  send(text);
  at("prompt").focus();
});

at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("composer").requestSubmit();
});

function stop() {
  if (!state.running) return;
  state.running.abort();
  at("prompt").focus();
}

at("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});

at("new").addEventListener("click", () => {
  stop();
  state.messages = [];
  at("log").replaceChildren();
  at("empty").hidden = false;
  state.chosen = null;
  showRound();
  showCurl();
  at("prompt").focus();
});

for (const id of ["prompt", "temperature", "max-tokens", "seed", "system"]) {
  at(id).addEventListener("input", () => showCurl());
}

at("copy").hidden = !navigator.clipboard;
at("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(at("curl").textContent);
  say("The request is copied.");
});

// ------------------------------------------------------------------ a round

function choose(answer, number) {
  state.chosen?.answer.mark(null);
  state.chosen = { answer, number };
  answer.mark(number);
  showRound();
}

function wordsOf(round, number) {
  if (number === 0) return "The first token: the prompt gave it, before any round.";
  const drafts = round.depths.filter((depth) => depth > 0).length;
  if (round.tree) {
    return `${round.tree.accepted.length - 1} drafts accepted of ${round.tree.tokens.length - 1} verified, then the bonus.`;
  }
  const plain = hasTrees() ? "This round had no tree: it was decoded plainly." : NO_TREES;
  return `${drafts} drafts accepted. ${plain}`;
}

function showRound() {
  const { answer, number } = state.chosen ?? {};
  const round = answer?.rounds[number];
  at("previous").disabled = !round || number === 0;
  at("next").disabled = !round || number + 1 >= answer.rounds.length;
  at("round-title").textContent = round ? (number ? `Round ${number}` : "Prompt") : "Round";
  at("round-words").textContent = round ? wordsOf(round, number) : "Choose a token of an answer.";
  const tree = round?.tree ?? null;
  at("tree").hidden = at("nodes").hidden = tree === null;
  at("tree").replaceChildren(...(tree ? [draw(tree)] : []));
  at("nodes-table").replaceChildren(...(tree ? [table(tree)] : []));
  if (round) say(`${at("round-title").textContent}: ${at("round-words").textContent}`);
}

for (const [id, step] of [["previous", -1], ["next", 1]]) {
  at(id).addEventListener("click", () => {
    const { answer, number } = state.chosen;
    choose(answer, number + step);
    answer.said.children[number + step].scrollIntoView({ block: "nearest" });
  });
}

// ------------------------------------------------------------------ start

const legend = [["first", "from the prompt"], ["d0", "bonus"]];
for (let depth = 1; depth <= DEEPEST; depth += 1) legend.push([`d${depth}`, `depth ${depth}${depth === DEEPEST ? "+" : ""}`]);
at("legend").append(...legend.map(([kind, words]) => make("li", {}, make("i", { class: kind }), words)));
connect();
showLoad();
setInterval(showLoad, LOAD_MS);
document.addEventListener("visibilitychange", showLoad);
