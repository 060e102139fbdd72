// One view comes in, the page is drawn anew. Text goes in as text, never as markup: events may hold anything.
"use strict";

const COLOURS = ["#3f7fbf", "#c8743a", "#3f9d6e", "#a05fb4", "#b5a232", "#c2527a", "#4aa3a8", "#7d7f8c"];
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  const made = name.startsWith("svg:") ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
}

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();
const size = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const at = bytes ? Math.min(Math.floor(Math.log2(bytes) / 10), units.length - 1) : 0;
  return `${(bytes / 2 ** (10 * at)).toFixed(at ? 1 : 0)} ${units[at]}`;
};
const brief = (value) => (Math.abs(value) >= 1000 || value === Math.round(value) ? String(Math.round(value)) : value.toPrecision(4));
const meshOf = (axes) => Object.entries(axes).map(([name, length]) => `${name}=${length}`).join(" x ") || "–";

let nodes = [];
const colourOf = (node) => {
  if (!nodes.includes(node)) nodes.push(node);
  return COLOURS[nodes.indexOf(node) % COLOURS.length];
};

function drawHead(view) {
  const current = view.generations.at(-1);
  const members = view.workers.filter((worker) => worker.rank !== null && worker.state !== "gone");
  document.title = `${view.state}: ${view.title}`;
  byId("title").textContent = view.title;
  byId("state").textContent = view.state;
  byId("state").className = `pill ${view.state}`;
  byId("step").textContent = view.step ?? "–";
  byId("mesh").textContent = meshOf(view.axes);
  byId("generation").textContent = current ? current.number : "–";
  byId("count").textContent = members.length;
  const value = (name, points) => (name in view.no_numbers ? `not a number since step ${view.no_numbers[name]}` : points.length ? brief(points.at(-1)[1]) : "–");
  const numbers = Object.entries(view.curves).slice(0, 4);
  byId("newest").replaceChildren(...numbers.map(([name, points]) => element("div", {}, element("dt", {}, name),
    element("dd", name in view.no_numbers ? { class: "bad" } : {}, value(name, points)))));
  byId("told").textContent = view.told || (current ? current.reason : "no events yet");
}

function drawWorkers(view) {
  const members = view.workers.filter((worker) => worker.rank !== null);
  const others = view.workers.filter((worker) => worker.rank === null).slice(-12);
  const last = Object.values(view.axes).at(-1) ?? 1;
  const box = (worker) => {
    const where = Object.entries(worker.coordinates).map(([axis, at]) => `${axis}${at}`).join(" ");
    return element("div", { class: `worker ${worker.state}`, style: `--node: ${colourOf(worker.node)}`, title: `${worker.node}, slot ${worker.slot}` },
      element("span", { class: "where" }, where),
      element("b", {}, worker.rank === null ? worker.node || "?" : `rank ${worker.rank}`),
      element("div", { class: "line" }, element("span", { class: "dot" }), `${worker.state} · pid ${worker.pid}${worker.step === null ? "" : ` · step ${worker.step}`}`));
  };
  const columns = Math.max(1, Math.min(last, 8));
  const grid = element("div", { class: "grid", style: `grid-template-columns: repeat(${columns}, minmax(0, 1fr))` }, ...members.map(box));
  const rest = element("div", { class: "grid", style: "grid-template-columns: repeat(3, minmax(0, 1fr))" }, ...others.map(box));
  byId("workers").replaceChildren(grid, ...(others.length ? [element("h2", {}, "Outside the mesh"), rest] : []));
  const legend = nodes.filter(Boolean).flatMap((node) => [element("i", { style: `background: ${colourOf(node)}` }), node]);
  byId("nodes").replaceChildren(...legend);
}

function drawMoves(view) {
  const chosen = byId("which").value;
  const options = view.moves.map((move) => element("option", { value: move.generation }, `generation ${move.generation}`));
  const newest = view.moves.at(-1);
  const wasNewest = !chosen || chosen === byId("which").lastElementChild?.value;
  byId("which").replaceChildren(...options);
  if (!newest) return;
  byId("which").value = wasNewest ? newest.generation : chosen;
  const move = view.moves.find((each) => String(each.generation) === byId("which").value) ?? newest;
  const generation = view.generations.find((each) => each.number === move.generation);
  const count = generation ? generation.num_workers : 1 + Math.max(0, ...move.bytes_by_pair.flatMap(([a, b]) => [a, b]));
  const onNow = generation && generation.number === view.generations.at(-1).number;
  const nodeOf = new Map(view.workers.filter((worker) => onNow && worker.rank !== null).map((worker) => [worker.rank, worker.node]));
  const at = (rank) => {
    const angle = (2 * Math.PI * rank) / count - Math.PI / 2;
    return [200 + 118 * Math.cos(angle), 150 + 118 * Math.sin(angle)];
  };
  const most = Math.max(1, ...move.bytes_by_pair.map(([, , bytes]) => bytes));
  const shapes = move.bytes_by_pair.map(([giver, taker, bytes]) => {
    const [x1, y1] = at(giver), [x2, y2] = at(taker);
    const bend = `Q ${200 + (x1 + x2 - 400) * 0.12 + (y2 - y1) * 0.12} ${150 + (y1 + y2 - 300) * 0.12 - (x2 - x1) * 0.12}`;
    const colour = nodeOf.has(giver) ? colourOf(nodeOf.get(giver)) : COLOURS[giver % COLOURS.length];
    const arc = element("svg:path", { class: "gift", d: `M ${x1} ${y1} ${bend} ${x2} ${y2}`, stroke: colour, "stroke-width": 1 + (9 * bytes) / most });
    arc.append(element("svg:title", {}, `rank ${giver} gave ${size(bytes)} to rank ${taker}`));
    return arc;
  });
  for (let rank = 0; rank < count && count <= 64; rank += 1) {
    const [x, y] = at(rank);
    shapes.push(element("svg:circle", { cx: x, cy: y, r: 11, fill: nodeOf.has(rank) ? colourOf(nodeOf.get(rank)) : "#8b93a3" }));
    shapes.push(element("svg:text", { x, y: y + 4, "text-anchor": "middle", style: "fill: #fff" }, rank));
  }
  byId("moves").replaceChildren(...shapes);
  byId("move-text").textContent = `${size(move.bytes_moved)} between ranks, ${size(move.bytes_from_disk)} from disk, ${move.seconds.toFixed(2)} s. From ${move.source}: ${move.reason}`;
}

// Why there is a new mesh, in a few words: "node-b joined", of "node-b joined; 4 workers fit dp=2 x tp=2".
const cause = (reason) => (reason.length > 30 ? reason.split(/[;(]/)[0] : reason).trim().slice(0, 40);

function drawCurve(name, points, marks) {
  const figure = byId("curve").content.cloneNode(true).firstElementChild;
  const [left, right, top, bottom] = [46, 550, 36, 156];
  const steps = points.map(([step]) => step), values = points.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (step) => left + ((right - left) * (step - steps[0])) / Math.max(1, steps.at(-1) - steps[0]);
  const y = (value) => bottom - ((bottom - top) * (value - low)) / (high - low || 1);
  const svg = figure.querySelector("svg");
  figure.querySelector("figcaption").textContent = name;
  svg.setAttribute("aria-label", `${name}, newest ${brief(values.at(-1))} at step ${steps.at(-1)}`);
  svg.append(element("svg:line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  const seen = marks.filter((mark) => mark.step > steps[0] && mark.step <= steps.at(-1));
  for (const [at, { step, number, reason }] of seen.entries()) {
    const line = element("svg:line", { class: "mark", x1: x(step), x2: x(step), y1: top, y2: bottom });
    line.append(element("svg:title", {}, `generation ${number} from step ${step}: ${reason}`));
    const isRight = x(step) > (left + right) / 2;
    const where = { x: x(step) + (isRight ? 3 : -3), y: top - (at % 2 ? 4 : 16), "text-anchor": isRight ? "end" : "start" };
    svg.append(line);
    if (seen.length <= 6) svg.append(element("svg:text", { class: "cause", ...where }, cause(reason)));
  }
  svg.append(element("svg:polyline", { class: "value", points: points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }));
  const label = (at, text, more = {}) => svg.append(element("svg:text", { x: at[0], y: at[1], ...more }, text));
  label([left - 6, top + 8], brief(high), { "text-anchor": "end" });
  label([left - 6, bottom], brief(low), { "text-anchor": "end" });
  label([left, bottom + 16], `step ${steps[0]}`);
  label([right, bottom + 16], steps.at(-1), { "text-anchor": "end" });
  label([right, top + 2], brief(values.at(-1)), { "text-anchor": "end", class: "newest" });
  return figure;
}

function drawCurves(view) {
  const marks = view.generations.slice(1);
  const drawn = Object.entries(view.curves).filter(([, points]) => points.length > 1).map(([name, points]) => drawCurve(name, points, marks));
  byId("curves").replaceChildren(element("h2", {}, drawn.length ? "Curves (dashed: a new mesh)" : "Curves: none yet"), ...drawn);
}

function drawTables(view) {
  const row = (...cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
  byId("happenings").replaceChildren(...view.happenings.toReversed().map((each) => row(clock(each.at_s), each.who, each.kind, each.text)));
  byId("checkpoints").replaceChildren(...view.checkpoints.toReversed().map((each) => row(each.step, clock(each.at_s), `${each.seconds.toFixed(2)} s`, each.path)));
}

let shown = null;
function draw(view) {
  shown = view;
  for (const part of [drawHead, drawWorkers, drawMoves, drawCurves, drawTables]) part(view);
}

byId("which").addEventListener("change", () => shown && drawMoves(shown));
const source = new EventSource("/events");
source.onopen = () => { byId("link").textContent = "live"; };
source.onerror = () => { byId("link").textContent = "no connection to the dashboard; trying again"; };
source.onmessage = (message) => draw(JSON.parse(message.data));
