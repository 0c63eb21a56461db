"use strict";
// The rows and pictures that stand in the page as JSON, a block an iteration. Whatever comes from a run enters the page
// through textContent and attributes alone, never as markup.

const read = (element) => JSON.parse(element.textContent);
const page = read(document.getElementById("page"));

/** One object an image, ascending by iteration; `at` is its place in the iteration's blocks. */
function readRows() {
  const rows = [];
  for (const element of document.querySelectorAll("script.rows")) {
    const block = read(element);
    const { sample_index, group_index, prompt, seed, reward, advantage } = block.columns;
    for (let at = 0; at < sample_index.length; at++) {
      rows.push({
        block, at, iteration: block.iteration, sample: sample_index[at], group: group_index[at],
        prompt: block.prompts[prompt[at]], seed: seed[at], reward: reward[at], advantage: advantage[at],
      });
    }
  }
  return rows;
}

/** Every figure of an image, [name, value], the ones that a person asks for first. */
function figuresOf(row) {
  const { block, at } = row;
  const own = [
    ["reward", row.reward], ["advantage", row.advantage], ["iteration", row.iteration], ["row (sample_index)", row.sample],
    ["group", row.group], ["seed", row.seed],
  ];
  const further = Object.entries(block.figures).map(([name, values]) => [name, Array.isArray(values) ? values[at] : values]);
  const attempts = Object.entries(block.attempts).map(([stage, attempt]) => [`${stage} attempt`, attempt]);
  return [...own, ...attempts, ...further].filter(([, value]) => value !== null && value !== undefined);
}

/** A figure by name, or null where the image has none. */
function figure(row, name) {
  const values = row.block.figures[name];
  return (Array.isArray(values) ? values[row.at] : values) ?? null;
}

const pictures = new Map();

/** The picture as a data: URL; an iteration's block is parsed when its first picture is asked for. */
function pictureOf(row) {
  const { iteration, kind } = row.block;
  if (!pictures.has(iteration)) pictures.set(iteration, read(document.getElementById(`pictures-${iteration}`)));
  return `data:${kind};base64,${pictures.get(iteration)[row.at]}`;
}

function shown(value, digits = 5) {
  if (typeof value !== "number") return String(value);
  return String(Number.isInteger(value) ? value : Number(value.toPrecision(digits))).replaceAll("-", "−");
}

function signed(value) {
  return `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
}

/** An element with a class and a text. */
function make(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}
