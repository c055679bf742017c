// The load sheet per card: what was planned, part by part, and what is used now beside it.
import { html } from "./html.js";
import { gib, number, scaleOf, size } from "./format.js";
import { known, t } from "./i18n.js";
import { use } from "./state.js";

const ORDER = [
  "weights.language", "weights.other", "weights.vision", "activations.language", "activations.vision", "workspace", "sampler",
  "cuda_graphs", "kv_cache", "context",
];
const rank = (name) => (ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length);

const partName = (name, host) => (host && name === "context" ? t("part.host") : known(`part.${name}`) ? t(`part.${name}`) : name);
export const onHost = (plan) => plan?.gpus?.[0]?.name === "cpu";
const partClass = (name) => `part-${name.replace(/[._]/g, "-")}`;

export function LoadSheet() {
  const plan = use((s) => s.plan);
  const snapshot = use((s) => s.snapshot);
  const reconcile = use((s) => s.reconcile);
  if (plan === null) return html`<p class="muted empty">${t("load.none")}</p>`;
  const verdict = plan.fits === true ? "fits" : plan.fits === false ? "does_not_fit" : "could_not_tell";
  return html`
    <section class="sheet">
      <p class="sheet-head"><span class=${`verdict ${verdict}`}>${t(`load.${verdict}`)}</span> <span class="muted">${[plan.model?.architecture, plan.model?.quantization].filter(Boolean).join(", ")}</span></p>
      ${plan.gpus.map((gpu) => html`<${Card} key=${gpu.index} gpu=${gpu} used=${gpu.name === "cpu" ? snapshot?.engine?.resident_bytes : snapshot?.cards?.find((one) => one.index === gpu.index)?.used_bytes} actual=${actualOf(reconcile, gpu.index)} one=${plan.gpus.length === 1} />`)}
      <${Cache} cache=${plan.kv_cache} />
      <${Balance} cards=${snapshot?.cards ?? []} />
    </section>
  `;
}

/** What was read of a card's parts; several that are only read together are one line. Null: nothing was compared. */
function actualOf(reconcile, index) {
  const lines = reconcile?.cards?.find((one) => one.index === index)?.lines ?? [];
  return lines.some((line) => line.actual !== null) ? lines : null;
}

function rows(parts, lines) {
  if (lines === null) return parts.map((part) => ({ ...part, names: [part.name], actual: null }));
  return lines
    .map((line) => {
      const names = (line.parts?.length ? line.parts : [line]).map((part) => part.name).sort((a, b) => rank(a) - rank(b));
      const bases = new Set(parts.filter((part) => names.includes(part.name)).map((part) => part.basis));
      return { names, bytes: line.planned, low: line.low, high: line.high, actual: line.actual, basis: bases.size === 1 ? [...bases][0] : null };
    })
    .filter((row) => row.bytes > 0 || row.actual > 0)
    .sort((a, b) => rank(a.names[0]) - rank(b.names[0]));
}

function Card({ gpu, used, actual, one }) {
  const parts = [...gpu.components].filter((part) => part.name !== "headroom" && part.bytes > 0).sort((a, b) => rank(a.name) - rank(b.name));
  const peak = gpu.peak_bytes?.serving ?? parts.reduce((sum, part) => sum + part.bytes, 0);
  const most = Math.max(peak, gpu.peak_high_bytes?.serving ?? peak);
  const scale = Math.max(gpu.total_bytes, peak, used ?? 0);
  const { unit, write } = scaleOf(most);
  const host = gpu.name === "cpu";
  const name = host ? t("load.host") : one && gpu.name ? gpu.name : t("load.card", { n: gpu.index }) + (gpu.name ? ` · ${gpu.name}` : "");
  return html`
    <section class="card" aria-label=${name}>
      <h3><span>${name}</span><span class="figure">${gib(gpu.total_bytes)}</span></h3>
      <p class="bar-name"><span>${t("load.plan")}</span><span class="figure">${t("load.peak", { bytes: size(peak), low: write(gpu.peak_low_bytes?.serving), high: write(gpu.peak_high_bytes?.serving) })}</span></p>
      <div class="bar" role="img" aria-label=${t("load.bar", { bytes: size(peak), total: gib(gpu.total_bytes) })}>
        ${parts.map((part) => html`<span key=${part.name} class=${partClass(part.name)} style=${{ width: `${(part.bytes / scale) * 100}%` }} title=${`${partName(part.name, host)} ${size(part.bytes)}`}></span>`)}
      </div>
      <p class="bar-name"><span>${t("load.actual")}</span><span class="figure">${used == null ? t("load.not_read") : size(used)}</span></p>
      <div class="bar thin" role="img" aria-label=${t("load.actual_bar", { bytes: size(used) })}>
        ${used != null && html`<span class=${used > most ? "used over" : "used"} style=${{ width: `${(used / scale) * 100}%` }}></span>`}
      </div>
      <table class="parts">
        <thead><tr><th scope="col">${t("load.part", { unit })}</th><th scope="col">${t("load.plan")}</th><th scope="col">${actual ? t("load.actual") : t("load.range")}</th><th scope="col">${t("load.basis")}</th></tr></thead>
        <tbody>
          ${rows(parts, actual).map(
            (row) => html`<tr key=${row.names[0]}>
              <th scope="row">${row.names.map((part) => html`<span class=${`swatch ${partClass(part)}`} aria-hidden="true"></span>`)}${row.names.map((part) => partName(part, host)).join(", ")}</th>
              <td title=${`${write(row.low)}–${write(row.high)}`}>${write(row.bytes)}</td>
              ${actual ? html`<td>${write(row.actual)}</td>` : html`<td class="muted">${row.low === row.high ? "" : `${write(row.low)}–${write(row.high)}`}</td>`}
              <td class="muted">${row.basis ? t(`basis.${row.basis}`) : ""}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </section>
  `;
}

function Cache({ cache }) {
  if (!cache || cache.tokens == null) return null;
  return html`<p class="facts">${t("load.cache", { bytes: size(cache.available_bytes), tokens: cache.tokens })}${cache.max_concurrency != null && cache.max_model_len != null ? t("load.concurrency", { n: number(cache.max_concurrency, 1), context: cache.max_model_len }) : ""}</p>`;
}

export function Balance({ cards }) {
  const used = cards.map((one) => one.used_bytes).filter((bytes) => bytes != null);
  if (used.length < 2) return null;
  const [low, high] = [Math.min(...used), Math.max(...used)];
  const busy = cards.map((one) => one.utilization).filter((share) => share != null);
  const apart = busy.length > 1 ? Math.max(...busy) - Math.min(...busy) : null;
  return html`
    <p class="facts">
      ${t("load.balance", { bytes: gib(high - low, 2), share: high > 0 ? number(((high - low) / high) * 100, 0) : 0 })}
      ${apart !== null && ` ${t("load.balance_busy", { share: number(apart * 100, 0) })}`}
    </p>
  `;
}
