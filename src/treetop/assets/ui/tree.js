// One round's tree, drawn and as a table.

const NODE = { width: 84, height: 34, gapX: 18, gapY: 8, margin: 10 };
const LONGEST = 9;
const SMALLEST = 0.85; // how far a wide tree is shrunk before it scrolls

export function make(name, attributes = {}, ...children) {
  const space = ["svg", "g", "rect", "text", "path", "title"].includes(name) ? "http://www.w3.org/2000/svg" : null;
  const element = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// A token as it can be seen: spaces and line ends have marks.
export function visible(text) {
  const shown = text.replaceAll(" ", "\u00b7").replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5");
  return shown || "\u2205";
}

function short(text) {
  const characters = [...visible(text)];
  return characters.length > LONGEST ? `${characters.slice(0, LONGEST - 1).join("")}\u2026` : characters.join("");
}

function percent(share) {
  if (share === null) return "";
  return share >= 0.995 ? "100%" : share >= 0.1 ? `${Math.round(100 * share)}%` : `${(100 * share).toFixed(1)}%`;
}

// The nodes with what follows from the tree: depth, the draft's probability after the parent, whether accepted.
export function nodesOf(tree) {
  const taken = new Set(tree.accepted);
  const nodes = [];
  tree.tokens.forEach((token, index) => {
    const parent = index ? tree.parents[index] : null;
    const given = tree.logprobs[index], above = parent === null ? 0 : tree.logprobs[parent];
    const own = parent === null || given === null || above === null ? null : Math.min(Math.exp(given - above), 1);
    const depth = parent === null ? 0 : nodes[parent].depth + 1;
    nodes.push({ index, token, parent, depth, own, text: tree.texts[index], kind: taken.has(index) ? "taken" : "" });
  });
  return nodes;
}

// Where each node stands: x by depth, y by the leaves below it in order. The first child, the draft's favourite, stands
// beside its parent.
function placed(nodes) {
  const children = nodes.map(() => []);
  for (const node of nodes) if (node.parent !== null) children[node.parent].push(node);
  let leaves = 0;
  const place = (node) => {
    const below = children[node.index];
    below.forEach(place);
    node.y = below.length ? below[0].y : leaves++;
  };
  place(nodes[0]);
  return leaves;
}

export function draw(tree) {
  const nodes = nodesOf(tree), end = nodes[tree.accepted.at(-1)];
  nodes.push({ index: nodes.length, parent: end.index, depth: end.depth + 1, own: null, text: tree.bonus_text, kind: "bonus" });
  const rows = placed(nodes), columns = Math.max(...nodes.map((node) => node.depth)) + 1;
  const x = (node) => NODE.margin + node.depth * (NODE.width + NODE.gapX);
  const y = (node) => NODE.margin + node.y * (NODE.height + NODE.gapY);
  const width = 2 * NODE.margin + columns * (NODE.width + NODE.gapX) - NODE.gapX;
  const height = 2 * NODE.margin + rows * (NODE.height + NODE.gapY) - NODE.gapY;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  svg.style.maxWidth = `${width}px`;
  svg.style.minWidth = `${SMALLEST * width}px`;
  for (const node of nodes.filter((each) => each.parent !== null)) {
    const up = nodes[node.parent], startX = x(up) + NODE.width, startY = y(up) + NODE.height / 2, endY = y(node) + NODE.height / 2;
    const middle = startX + NODE.gapX / 2;
    svg.append(make("path", { class: node.kind, d: `M${startX} ${startY}C${middle} ${startY} ${middle} ${endY} ${x(node)} ${endY}` }));
  }
  for (const node of nodes) {
    const words = node.kind === "bonus" ? "bonus" : node.depth ? percent(node.own) : "root";
    const group = make("g", { class: node.kind, transform: `translate(${x(node)} ${y(node)})` },
      make("title", {}, JSON.stringify(node.text)),
      make("rect", { width: NODE.width, height: NODE.height, rx: 6 }),
      make("text", { x: 8, y: words ? 15 : 21 }, short(node.text)));
    if (words) group.append(make("text", { class: "own", x: 8, y: 28 }, words));
    svg.append(group);
  }
  return svg;
}

export function table(tree) {
  const head = make("tr", {}, ...["Token", "Depth", "After", "Probability", ""].map((name) => make("th", { scope: "col" }, name)));
  const nodes = nodesOf(tree);
  const rows = nodes.map((node) => make("tr", {},
    make("td", { class: "token" }, visible(node.text)),
    make("td", {}, String(node.depth)),
    make("td", { class: "token" }, node.parent === null ? "" : visible(nodes[node.parent].text)),
    make("td", {}, percent(node.own)),
    make("td", {}, node.parent === null ? "root" : node.kind && "accepted")));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}
