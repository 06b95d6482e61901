// One answer on the page: its tokens by round, its figures, and which round is chosen.

import { make } from "./tree.js";

export const DEEPEST = 6; // depths with a colour of their own

// Whether a tree is the one that a round's ids came of; the last round may have been cut.
function fits(tree, ids) {
  const gave = [...tree.accepted.slice(1).map((node) => tree.tokens[node]), tree.bonus];
  return ids.every((id, place) => gave[place] === id);
}

export class Answer {
  // element: what the answer is shown in. choose: called with (answer, number of a round) when one is chosen.
  constructor(element, choose) {
    this.rounds = []; // {ids, depths, texts, tree}; the first is the token that the prompt gave
    this.content = "";
    this.finished = null;
    this.accepted = null; // mean accept length as the server tells it
    this.started = performance.now();
    this.firstAt = this.lastAt = null;
    this.numFirst = this.numTokens = 0;
    this.choose = choose;
    this.said = make("div", { class: "said busy", role: "group", "aria-label": "Answer by rounds" });
    this.figures = make("p", { class: "figures" });
    element.append(this.said, this.figures);
    this.said.addEventListener("click", (event) => this.pick(event.target.closest(".round")));
    this.said.addEventListener("keydown", (event) => this.key(event));
  }

  // A choice of an event.
  add(choice) {
    this.content += choice.delta?.content ?? choice.text ?? "";
    this.finished = choice.finish_reason ?? this.finished;
    const { draft_depths: depths = [], texts = [], draft_trees: trees = [] } = choice.treetop ?? {};
    if (!depths.length) return;
    this.lastAt = performance.now();
    if (this.firstAt === null) [this.firstAt, this.numFirst] = [this.lastAt, depths.length];
    this.numTokens += depths.length;
    const left = [...trees];
    for (let start = 0; start < depths.length;) {
      const bonus = depths.indexOf(0, start), end = bonus < 0 ? depths.length : bonus + 1;
      const ids = choice.token_ids.slice(start, end);
      const isRound = this.rounds.length > 0 && left.length > 0 && (left[0] === null || fits(left[0], ids));
      this.show({ ids, depths: depths.slice(start, end), texts: texts.slice(start, end), tree: isRound ? left.shift() : null });
      start = end;
    }
    this.tell();
  }

  show(round) {
    const number = this.rounds.push(round) - 1;
    const tokens = round.texts.map((text, place) => {
      const depth = Math.min(round.depths[place], DEEPEST);
      const kind = number === 0 ? "first" : `d${depth}`;
      return make("span", { class: `t ${kind}`, title: number === 0 ? "the prompt's" : depth ? `draft at depth ${round.depths[place]}` : "bonus" }, text);
    });
    const button = make("span", { class: "round", role: "button", tabindex: number ? -1 : 0, "data-round": number }, ...tokens);
    this.said.append(button);
  }

  pick(element) {
    if (!element) return;
    for (const each of this.said.children) each.tabIndex = each === element ? 0 : -1;
    element.focus({ preventScroll: true });
    this.choose(this, Number(element.dataset.round));
  }

  key(event) {
    const at = event.target.closest(".round");
    if (!at) return;
    const go = { ArrowRight: at.nextElementSibling, ArrowLeft: at.previousElementSibling,
      Home: this.said.firstElementChild, End: this.said.lastElementChild, Enter: at, " ": at };
    if (!(event.key in go)) return;
    event.preventDefault();
    const target = go[event.key];
    this.pick(target);
    target?.scrollIntoView({ block: "nearest" });
  }

  mark(number) {
    for (const each of this.said.querySelectorAll(".now")) each.classList.remove("now");
    if (number !== null) this.said.children[number]?.classList.add("now");
  }

  get numRounds() {
    return Math.max(this.rounds.length - 1, 0);
  }

  get acceptLength() {
    return this.accepted ?? (this.numRounds ? (this.numTokens - 1) / this.numRounds : null);
  }

  // The server's own figures, with the last event.
  metrics(metrics) {
    this.accepted = metrics?.speculative_decoding?.mean_acceptance_length ?? this.accepted;
  }

  tell() {
    const parts = [`${this.numTokens} tokens`];
    if (this.numRounds) parts.push(`${this.numRounds} rounds`);
    if (this.acceptLength !== null) parts.push(`accept length ${this.acceptLength.toFixed(2)}`);
    const seconds = (this.lastAt - this.firstAt) / 1000;
    if (seconds > 0) parts.push(`${((this.numTokens - this.numFirst) / seconds).toFixed(1)} tokens/s`);
    if (this.firstAt !== null) parts.push(`first after ${Math.round(this.firstAt - this.started)} ms`);
    if (this.finished && this.finished !== "stop") parts.push(this.finished === "length" ? "cut at its length" : this.finished);
    this.figures.textContent = parts.join(" \u00b7 ");
    return this.figures.textContent;
  }

  end(error) {
    this.said.classList.remove("busy");
    if (this.numTokens) this.tell();
    if (error) this.figures.after(make("p", { class: "error", role: "alert" }, error));
  }
}
