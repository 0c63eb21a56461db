const $ = (id) => document.getElementById(id);
const form = $("controls"), large = $("large");
const rows = readRows();
const hasText = rows.some((row) => figure(row, "recognized") !== null);
const scores = page.scores.length > 1 ? page.scores : [];

function captionOf(row) {
  const numbers = make("span", "numbers");
  numbers.append(make("b", "", row.reward === null ? "no reward" : shown(row.reward, 3)));
  if (row.advantage !== null) {
    numbers.append(make("span", row.advantage < 0 ? "down" : "up", signed(row.advantage)));
    numbers.lastChild.title = "advantage";
  }
  const lines = [numbers, make("span", "", `it ${row.iteration} · seed ${row.seed}`)];
  if (scores.length) {
    const values = scores.map((name) => [name, figure(row, `score_${name}`)]).filter(([, value]) => value !== null);
    lines.push(make("span", "", values.map(([name, value]) => `${name} ${shown(value)}`).join(" · ")));
  }
  if (hasText) lines.push(make("span", "", `read “${figure(row, "recognized") ?? ""}”`));
  for (const line of lines.slice(1)) line.title = line.textContent;
  return lines;
}

const list = new List($("list"), {
  caption: captionOf, captionHeight: 48 + 18 * ((scores.length ? 1 : 0) + (hasText ? 1 : 0)), open: openLarge,
});

// Which rows, in which order

function matching(wanted) {
  const text = wanted.prompt.toLowerCase();
  const [from, to] = [bound(wanted.from, -Infinity), bound(wanted.to, Infinity)];
  const [low, high] = [bound(wanted.low, -Infinity), bound(wanted.high, Infinity)];
  const anyReward = wanted.low === "" && wanted.high === "";
  return rows.filter((row) =>
    row.iteration >= from && row.iteration <= to
    && (anyReward || (row.reward !== null && row.reward >= low && row.reward <= high))
    && (!text || row.prompt.toLowerCase().includes(text)));
}

const bound = (text, otherwise) => (text === "" ? otherwise : Number(text));

/** By `key`; those without it last, whichever way; equal ones as they stand in the run. */
function sorted(some, key, order) {
  const sign = order === "up" ? 1 : -1;
  return [...some].sort((a, b) => {
    if (a[key] === null || b[key] === null) return (a[key] === null) - (b[key] === null);
    return sign * (a[key] - b[key]) || a.iteration - b.iteration || a.sample - b.sample;
  });
}

function gathered(some, keyOf) {
  const found = new Map();
  for (const row of some) {
    const key = keyOf(row);
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(row);
  }
  return [...found.values()];
}

/** What a group is sorted by: its mean reward, the span of its advantages, or the first of its images in their order. */
function groupKey(members, key) {
  const values = members.map((row) => row[key]).filter((value) => value !== null);
  if (!values.length) return null;
  if (key === "advantage") return Math.max(...values) - Math.min(...values);
  if (key === "reward") return figure(members[0], "group_mean") ?? values.reduce((a, b) => a + b) / values.length;
  return values[0];
}

function groupSections(some, wanted) {
  const groups = gathered(some, (row) => `${row.iteration}/${row.group}`).map((members) => {
    const images = sorted(members, wanted.sort, wanted.order);
    return { images, iteration: members[0].iteration, sample: members[0].sample, key: groupKey(images, wanted.sort) };
  });
  return sorted(groups, "key", wanted.order).map(({ images }) => {
    const [{ iteration, group, prompt, block }] = images;
    const [mean, spread] = ["group_mean", "group_std"].map((name) => figure(images[0], name));
    const { total, ranks } = block.groups[group];
    const parts = [`iteration ${iteration}, group ${group}`];
    if (mean !== null) parts.push(`mean ${shown(mean)}, spread ${shown(spread)}`);
    const span = groupKey(images, "advantage");
    if (span !== null) parts.push(`advantages ${shown(span, 3)} apart`);
    parts.push(ranks.length < total
      ? `${ranks.length} of ${total} in this page, by reward number ${ranks.join(", ")}`
      : `${total} image${total === 1 ? "" : "s"}`);
    return { title: prompt, detail: parts.join(" · "), rows: images };
  });
}

function promptSections(some, wanted) {
  return gathered(some, (row) => row.prompt).map((members) => {
    const byIteration = gathered(members, (row) => row.iteration).sort(([a], [b]) => a.iteration - b.iteration);
    const picked = byIteration.flatMap((same) => pick(sorted(same, "reward", "down"), wanted.pick));
    const means = byIteration.map((same) => same[0]).map((row) => figure(row, "group_mean")).filter((m) => m !== null);
    const parts = [`${byIteration.length} iteration${byIteration.length === 1 ? "" : "s"}`];
    if (means.length > 1) parts.push(`group mean ${shown(means[0])} → ${shown(means.at(-1))}`);
    return { title: members[0].prompt, detail: parts.join(" · "), rows: picked, iterations: byIteration.length };
  }).sort((a, b) => b.iterations - a.iterations);
}

function pick(falling, which) {
  if (which === "all") return falling;
  const place = { best: 0, median: (falling.length - 1) >> 1, worst: falling.length - 1 }[which];
  return [falling[place]];
}

function refresh() {
  const wanted = Object.fromEntries(new FormData(form));
  const some = matching(wanted);
  form.querySelector(".of-prompts").hidden = wanted.view !== "prompts";
  const sections = wanted.view === "images" ? [{ rows: sorted(some, wanted.sort, wanted.order) }]
    : wanted.view === "groups" ? groupSections(some, wanted) : promptSections(some, wanted);
  const tops = $("list").offsetTop - form.offsetHeight;
  if (scrollY > tops) scrollTo(0, tops);
  list.show(sections, Number(wanted.size));
  $("none").hidden = list.order.length > 0;
  const said = sections.length > 1 ? `, ${sections.length.toLocaleString("en")} ${wanted.view}` : "";
  $("count").textContent = `${list.order.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} images${said}`;
}

form.addEventListener("input", refresh);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(refresh));

/** Set a control by name, as a person would. */
function set(values) {
  for (const [name, value] of Object.entries(values)) form.elements[name].value = value;
  refresh();
}

// The curve

const inPage = new Set(rows.map((row) => row.iteration)), leftOut = new Set(page.left_out);

/** The point that is nearest to the pointer, in the wide curve or the narrow one. */
function pointAt({ currentTarget: curve, clientX, clientY }) {
  const { left, right, first, last } = curve.dataset;
  const x = new DOMPoint(clientX, clientY).matrixTransform(curve.getScreenCTM().inverse()).x;
  const iteration = Number(first) + (x - left) / (right - left) * (last - first);
  return page.points.reduce((best, p) => (Math.abs(p[0] - iteration) < Math.abs(best[0] - iteration) ? p : best));
}

function describe(event) {
  const [iteration, mean, low, high, zero] = pointAt(event);
  const spread = zero === null ? "" : `, ${Math.round(zero * 100)}% of groups without spread`;
  const absent = inPage.has(iteration) ? "" : " · not in this page";
  $("curve-says").textContent = `iteration ${iteration}: mean ${shown(mean)}, ${shown(low)} to ${shown(high)}${spread}${absent}`;
}

function choose(event) {
  const [iteration] = pointAt(event);
  if (inPage.has(iteration)) set({ from: iteration, to: iteration });
  else {
    const why = leftOut.has(iteration) ? "the list above says why" : `write one that shows it with --iterations ${iteration}, or all`;
    $("curve-says").textContent = `The images of iteration ${iteration} are not in this page: ${why}.`;
  }
}

if (page.points.length) {
  for (const curve of document.querySelectorAll("#curve svg")) {
    curve.addEventListener("pointermove", describe);
    curve.addEventListener("click", choose);
  }
} else $("curve-says").hidden = true;

// One image, large

let openNumber = 0;

function openLarge(number) {
  openNumber = number;
  const row = list.order[number];
  const picture = $("large-picture");
  picture.src = pictureOf(row);
  picture.alt = row.prompt;
  picture.className = page.pixels < 160 ? "small" : "";
  $("large-prompt").textContent = row.prompt;
  $("large-note").textContent = page.reduced
    ? `Here as ${page.reduced}; the original is in ${row.block.folder}` : row.block.folder;
  $("large-figures").replaceChildren(...figuresOf(row).map(([name, value]) => {
    const line = make("tr");
    const head = make("th", "", name);
    head.scope = "row";
    line.append(head, make("td", "", shown(value)));
    return line;
  }));
  $("large-command").textContent = `${page.command[0]} ${row.iteration} ${row.sample}${page.command[1]}`;
  if (!large.open) large.showModal();
}

function step(key) {
  const next = list.neighbour(openNumber, key);
  if (next !== null && next !== openNumber) openLarge(next);
  return next !== null;
}

large.addEventListener("keydown", (event) => {
  if (step(event.key)) event.preventDefault();
});
large.addEventListener("close", () => list.focus(openNumber));
large.addEventListener("click", (event) => {
  if (event.target === large) large.close();
});
$("previous").addEventListener("click", () => step("ArrowLeft"));
$("next").addEventListener("click", () => step("ArrowRight"));
$("close").addEventListener("click", () => large.close());
$("across").addEventListener("click", () => {
  const { prompt } = list.order[openNumber];
  openNumber = 0;
  large.close();
  set({ view: "prompts", prompt, pick: "best", from: "", to: "", low: "", high: "" });
});
document.addEventListener("keydown", (event) => {
  if (large.open || event.target.matches("input, select") || list.element.contains(event.target)) return;
  if (event.key === "ArrowRight" && list.order.length) list.focus(list.current);
});

refresh();
