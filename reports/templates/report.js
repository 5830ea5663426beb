// Filter, sort, copy and charts of the report. Everything is readable without this script, except the charts.

const shared = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("filter");
const count = form.querySelector("output");

// Filter

function wanted() {
  const chosen = Object.fromEntries(new FormData(form));
  const words = chosen.words.toLowerCase().split(/\s+/).filter(Boolean);
  delete chosen.words;
  return { words, chosen: Object.entries(chosen).filter(([, value]) => value) };
}

function passes({ words, chosen }, about, text) {
  const has = (name, value) => about[name] === value || about[name].split(/[ /]/).includes(value);
  return chosen.every(([name, value]) => about[name] === undefined || has(name, value))
    && words.every((word) => text.includes(word));
}

const texts = new WeakMap();

function textOf(element) {
  if (!texts.has(element)) {
    texts.set(element, `${element.textContent} ${Object.values(element.dataset).join(" ")}`.toLowerCase());
  }
  return texts.get(element);
}

function applyFilter() {
  const filter = wanted();
  const items = document.querySelectorAll("tbody tr, .filtered");
  let shown = 0;
  for (const item of items) {
    item.hidden = !passes(filter, item.dataset, textOf(item));
    shown += !item.hidden;
  }
  const filtering = filter.words.length + filter.chosen.length > 0;
  count.textContent = filtering ? `${shown.toLocaleString("en")} of ${items.length.toLocaleString("en")} rows` : "";
  for (const note of document.querySelectorAll("section > .none, table + .none")) {
    note.hidden = note.parentElement.querySelector("tbody tr:not([hidden]), .filtered:not([hidden])") !== null;
  }
  for (const section of document.querySelectorAll(".op")) {
    section.hidden = filtering && section.querySelector("tbody tr:not([hidden])") === null;
  }
  redraw();
}

// Sort

function sortBy(header) {
  const descending = header.ariaSort === "descending" || (header.ariaSort === null && header.matches(".number"));
  const ascending = header.ariaSort === null ? !descending : descending;
  const body = header.closest("table").tBodies[0];
  const value = (row) => row.cells[header.cellIndex];
  const compare = (a, b) => {
    const [x, y] = [a.dataset.order, b.dataset.order];
    if (x !== undefined && y !== undefined) return x - y;
    if (x !== undefined || y !== undefined) return x === undefined ? -1 : 1;
    return a.textContent.localeCompare(b.textContent, "en", { numeric: true });
  };
  const sign = ascending ? 1 : -1;
  const rows = [...body.rows].sort((a, b) => sign * compare(value(a), value(b)));
  body.append(...rows);
  for (const other of header.parentElement.cells) other.ariaSort = null;
  header.ariaSort = ascending ? "ascending" : "descending";
}

// Copy

async function copy(button) {
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code);
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// Charts

const WIDTH_OF_FACET = 285;

function theme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const [ink, quiet, line, wrong] = ["ink", "quiet", "line", "wrong"].map(colour);
  const text = { labelColor: quiet, titleColor: quiet, labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal" };
  return {
    background: "transparent",
    font: getComputedStyle(document.body).fontFamily,
    view: { stroke: line },
    axis: { ...text, gridColor: line, domainColor: line, tickColor: line, labelLimit: innerWidth < 700 ? 130 : 300 },
    legend: { ...text, symbolStrokeColor: "transparent" },
    header: { labelColor: ink, labelFontSize: 12, labelFontWeight: 600, labelAnchor: "start" },
    range: {
      category: [1, 2, 3, 4, 5, 6].map((number) => colour(`series-${number}`)),
      heatmap: [colour("low"), colour("high")],
      ramp: [colour("low"), colour("high")],
    },
    style: {
      map: { stroke: colour("page"), strokeWidth: 1 },
      wrong: { stroke: wrong, strokeWidth: 2 },
      figure: { color: ink, fontSize: 10.5 },
      cases: { opacity: 0.75 },
      ring: { color: wrong, strokeWidth: 1.75, opacity: 1 },
    },
  };
}

const several = new Set(shared.subjects.map((subject) => subject.device)).size > 1;

// As many facets side by side as there is room for, in rows of like length.
function columnsOf(rows, field, width) {
  const facets = new Set(rows.map((row) => row[field])).size;
  const room = Math.max(1, Math.floor(width / WIDTH_OF_FACET));
  return Math.ceil(facets / Math.ceil(facets / room));
}

function described(names, row) {
  const item = Object.fromEntries(names.map((name, index) => [name, row[index]]));
  const { kernel, device } = shared.subjects[item.subject];
  return { ...item, kernel, device, subjectName: several ? `${kernel} on ${device}` : kernel };
}

class Chart {
  constructor(figure, name, data) {
    this.figure = figure;
    this.name = name;
    this.specification = data.specifications[name];
    this.rows = data.rows[name].map((row) => described(shared.columns[name], row));
    this.filter = wanted();
  }

  get chosen() {
    return this.rows.filter((row) => {
      const about = { ...shared.subjects[row.subject], dtype: row.dtype };
      return passes(this.filter, about, `${Object.values(about).join(" ")} ${row.stage ?? ""}`.toLowerCase());
    });
  }

  // Draws the chart when it is next in sight, which may be now.
  redraw(filter) {
    this.filter = filter;
    observer.unobserve(this.figure);
    observer.observe(this.figure);
  }

  async draw() {
    const plot = this.figure.querySelector(".plot");
    const rows = this.chosen;
    plot.hidden = rows.length === 0;
    this.figure.querySelector(".none").hidden = rows.length > 0;
    if (rows.length === 0) return;
    const specification = { ...this.specification, datasets: { [this.name]: rows } };
    if (specification.columns) specification.columns = columnsOf(rows, specification.facet.field, plot.clientWidth);
    plot.style.minHeight = `${plot.offsetHeight}px`; // so that the page does not jump
    await vegaEmbed(plot, specification, { actions: false, ast: true, renderer: "svg", config: theme() });
    plot.style.minHeight = "0";
  }
}

function chartsOf(section) {
  const script = section.querySelector("script[type='application/json']");
  if (script === null) return [];
  const data = JSON.parse(script.textContent);
  return [...section.querySelectorAll("figure")].map((figure) => new Chart(figure, figure.dataset.chart, data));
}

const charts = [...document.querySelectorAll(".op")].flatMap(chartsOf);
const ofFigure = new Map(charts.map((chart) => [chart.figure, chart]));
const observer = new IntersectionObserver((entries) => {
  for (const entry of entries.filter(({ isIntersecting }) => isIntersecting)) {
    observer.unobserve(entry.target);
    ofFigure.get(entry.target).draw();
  }
}, { rootMargin: "400px" });

function redraw() {
  const filter = wanted();
  for (const chart of charts) chart.redraw(filter);
}

// Events

let pause;
for (const type of ["input", "change"]) {
  form.addEventListener(type, () => {
    clearTimeout(pause);
    pause = setTimeout(applyFilter, 120);
  });
}
form.addEventListener("reset", () => setTimeout(applyFilter));
form.addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("click", ({ target }) => {
  if (target.matches(".sort")) sortBy(target.closest("th"));
  if (target.matches(".copy")) copy(target);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
redraw();
