// Live readings: one time axis for all charts, one cursor over them.
import { html, useEffect, useRef, useState } from "./html.js";
import uPlot from "../vendor/uplot.js";
import { bareGib, clock, number, percent, seconds } from "./format.js";
import { locale, t, useLanguage } from "./i18n.js";
import { Balance, onHost } from "./loadsheet.js";
import { column, names, onSeries, series } from "./series.js";
import { use } from "./state.js";
import { onTheme } from "./theme.js";

const sheet = document.createElement("link");
sheet.rel = "stylesheet";
sheet.href = new URL("../vendor/uplot.css", import.meta.url).href;
document.head.append(sheet);

const WINDOW_S = 300;
const HEIGHT = 96;
const GIB_STEPS = [1, 2, 4, 8, 16, 32, 64, 128].map((n) => n * 2 ** 30);
const sync = uPlot.sync("live");

const cardsOf = (prefix) => names().filter((name) => name.startsWith(prefix)).sort((a, b) => Number(a.split(".")[1]) - Number(b.split(".")[1]));

function charts(total) {
  const card = (name) => t("load.card", { n: name.split(".")[1] });
  return [
    { key: "memory", title: t("live.memory"), columns: cardsOf("used."), label: card, write: (v) => bareGib(v, 1), tick: (v) => bareGib(v, 0), top: total, steps: GIB_STEPS },
    { key: "busy", title: t("live.busy"), columns: cardsOf("utilization."), label: card, write: (v) => percent(v), top: 1 },
    { key: "tokens", title: t("live.tokens"), columns: ["tokens"], label: () => t("live.tokens"), write: (v) => number(v, 0) },
    { key: "first", title: t("live.first"), columns: ["first_token"], label: () => t("live.first"), write: (v) => seconds(v) },
    { key: "queue", title: t("live.queue"), columns: ["running", "waiting"], label: (name) => t(`live.${name}`), write: (v) => number(v, 0) },
    { key: "cache", title: t("live.cache"), columns: ["cache"], label: () => t("live.cache"), write: (v) => percent(v), top: 1 },
  ].filter((one) => one.columns.some((name) => names().includes(name) && column(name).some((value) => value !== null)));
}

export function Live() {
  const snapshot = use((s) => s.snapshot);
  const plan = use((s) => s.plan);
  useLanguage();
  const [, redraw] = useState(0);
  const [shade, setShade] = useState(0);
  useEffect(() => onSeries(() => redraw((n) => n + 1)), []);
  useEffect(() => onTheme(() => setShade((n) => n + 1)), []);
  const engine = snapshot?.engine ?? null;
  const total = Math.max(0, ...(snapshot?.cards ?? []).map((one) => one.total_bytes ?? 0), ...(plan?.gpus ?? []).map((one) => one.total_bytes)) || undefined;
  const shown = charts(total);
  return html`
    <section class="live">
      <dl class="now">
        <${Figure} name=${t("live.tokens")} value=${lastOf("tokens")} write=${(v) => number(v, 0)} />
        <${Figure} name=${t("live.first")} value=${engine?.time_to_first_token_s} write=${seconds} />
        <${Figure} name=${t("live.running")} value=${engine?.running} write=${number} />
        <${Figure} name=${t("live.waiting")} value=${engine?.waiting} write=${number} />
        <${Figure} name=${t("live.cache")} value=${engine?.kv_cache_usage} write=${(v) => percent(v, v < 0.1 ? 1 : 0)} />
      </dl>
      <${Balance} cards=${snapshot?.cards ?? []} />
      ${shown.length === 0 && html`<p class="muted empty">${t("live.none")}</p>`}
      ${shown.map((one) => html`<${Chart} key=${`${one.key}${one.columns.join()}${shade}${locale()}`} chart=${one} />`)}
      ${(snapshot?.missing ?? []).map((text) => html`<p class="muted small-text">${onHost(plan) && text.startsWith("the cards:") ? t("live.no_cards") : text}</p>`)}
    </section>
  `;
}

const lastOf = (name) => (names().includes(name) ? (column(name).at(-1) ?? null) : null);

const Figure = ({ name, value, write }) => html`<div><dt>${name}</dt><dd>${value == null ? "–" : write(value)}</dd></div>`;

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function Chart({ chart }) {
  const root = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    const ink = style("--muted");
    const line = style("--line");
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", size: 48 };
    plot.current = new uPlot(
      {
        width: root.current.clientWidth || 300,
        height: HEIGHT,
        cursor: { sync: { key: sync.key }, points: { size: 5 }, y: false, drag: { x: false, y: false } },
        legend: { show: false },
        padding: [6, 4, 0, 0],
        scales: {
          x: { time: true, range: () => [latest() - WINDOW_S, latest()] },
          y: { range: (u, low, high) => [0, chart.top ?? Math.max(high ?? 0, 1) * 1.1] },
        },
        axes: [
          { ...axis, size: 22, space: 40, values: (u, ticks) => ticks.map(clock) },
          { ...axis, space: 28, ...(chart.steps ? { incrs: chart.steps } : {}), values: (u, ticks) => ticks.map((v) => (chart.tick ?? chart.write)(v)) },
        ],
        series: [{}, ...chart.columns.map((name, i) => ({ label: chart.label(name), stroke: style(`--series-${(i % 6) + 1}`), width: 1.5, points: { show: false }, spanGaps: false }))],
      },
      data(chart),
      root.current,
    );
    const place = root.current;
    const drawn = plot.current;
    const fit = new ResizeObserver(() => place.clientWidth > 0 && drawn.setSize({ width: place.clientWidth, height: HEIGHT }));
    fit.observe(place);
    return () => {
      fit.disconnect();
      plot.current = null;
      drawn.destroy();
    };
  }, []);
  useEffect(() => plot.current?.setData(data(chart)));
  const last = chart.columns.map((name) => [name, lastOf(name)]);
  return html`
    <figure class="chart">
      <figcaption>
        <span>${chart.title}</span>
        <span class="figure">
          ${last.map(([name, value], i) => html`<span class="legend"><span class=${`swatch series-${(i % 6) + 1}`} aria-hidden="true"></span>${chart.columns.length > 1 ? `${chart.label(name)} ` : ""}${value === null ? "–" : chart.write(value)}</span>`)}
        </span>
      </figcaption>
      <div ref=${root} role="img" aria-label=${`${chart.title}: ${last.map(([name, value]) => `${chart.label(name)} ${value === null ? t("unknown") : chart.write(value)}`).join(", ")}`}></div>
    </figure>
  `;
}

const latest = () => series.time.at(-1) ?? Date.now() / 1000;
const data = (chart) => [series.time, ...chart.columns.map((name) => column(name))];
