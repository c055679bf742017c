// The load sheet per card: what was planned, part by part, and what is used now beside it.
import { html } from "./html.js";
import { bareGib, gib, number } from "./format.js";
import { known, t } from "./i18n.js";
import { use } from "./state.js";

// The order of the scale: weights, vision, activations, graphs, cache, context, headroom.
const ORDER = [
  "weights.language", "weights.other", "weights.vision", "activations.language", "activations.vision", "workspace", "sampler",
  "cuda_graphs", "kv_cache", "context",
];
const rank = (name) => (ORDER.includes(name) ? ORDER.indexOf(name) : ORDER.length);

export const partName = (name) => (known(`part.${name}`) ? t(`part.${name}`) : name);
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
      ${plan.gpus.map((gpu) => html`<${Card} key=${gpu.index} gpu=${gpu} reading=${(snapshot?.cards ?? []).find((one) => one.index === gpu.index) ?? null} actual=${actualOf(reconcile, gpu.index)} one=${plan.gpus.length === 1} />`)}
      <${Cache} cache=${plan.kv_cache} />
      <${Balance} cards=${snapshot?.cards ?? []} />
    </section>
  `;
}

/** What was measured of each part of a card: name -> bytes. */
function actualOf(reconcile, index) {
  const card = (reconcile?.gpus ?? reconcile?.cards ?? []).find((one) => one.index === index);
  const found = {};
  for (const one of card?.components ?? []) {
    const bytes = one.actual_bytes ?? one.actual ?? null;
    if (bytes !== null) found[one.name] = bytes;
  }
  return found;
}

function Card({ gpu, reading, actual, one }) {
  const parts = [...gpu.components].filter((part) => part.name !== "headroom" && part.bytes > 0).sort((a, b) => rank(a.name) - rank(b.name));
  const peak = gpu.peak_bytes?.serving ?? parts.reduce((sum, part) => sum + part.bytes, 0);
  const most = Math.max(peak, gpu.peak_high_bytes?.serving ?? peak);
  const scale = Math.max(gpu.total_bytes, peak, reading?.used_bytes ?? 0);
  const host = gpu.name === "cpu";
  const name = host ? t("load.host") : one && gpu.name ? gpu.name : t("load.card", { n: gpu.index }) + (gpu.name ? ` · ${gpu.name}` : "");
  return html`
    <section class="card" aria-label=${name}>
      <h3><span>${name}</span><span class="figure">${gib(gpu.total_bytes)}</span></h3>
      <p class="bar-name"><span>${t("load.plan")}</span><span class="figure">${t("load.peak", { bytes: gib(peak), low: bareGib(gpu.peak_low_bytes?.serving), high: bareGib(gpu.peak_high_bytes?.serving) })}</span></p>
      <div class="bar" role="img" aria-label=${t("load.bar", { bytes: gib(peak), total: gib(gpu.total_bytes) })}>
        ${parts.map((part) => html`<span key=${part.name} class=${partClass(part.name)} style=${{ width: `${(part.bytes / scale) * 100}%` }} title=${`${partName(part.name)} ${gib(part.bytes, 2)}`}></span>`)}
      </div>
      <p class="bar-name"><span>${t("load.actual")}</span><span class="figure">${reading?.used_bytes == null ? t("load.not_read") : gib(reading.used_bytes, 1)}</span></p>
      <div class="bar thin" role="img" aria-label=${t("load.actual_bar", { bytes: reading?.used_bytes == null ? t("unknown") : gib(reading.used_bytes) })}>
        ${reading?.used_bytes != null && html`<span class=${reading.used_bytes > most ? "used over" : "used"} style=${{ width: `${(reading.used_bytes / scale) * 100}%` }}></span>`}
      </div>
      <table class="parts">
        <thead><tr><th scope="col">${t("load.part")}</th><th scope="col">${t("load.plan")}</th><th scope="col">${t("load.range")}</th>${Object.keys(actual).length > 0 && html`<th scope="col">${t("load.actual")}</th>`}<th scope="col">${t("load.basis")}</th></tr></thead>
        <tbody>
          ${parts.map(
            (part) => html`<tr key=${part.name}>
              <th scope="row"><span class=${`swatch ${partClass(part.name)}`} aria-hidden="true"></span>${partName(part.name)}</th>
              <td>${bareGib(part.bytes, 2)}</td>
              <td class="muted">${part.low === part.high ? "" : `${bareGib(part.low, 1)}–${bareGib(part.high, 1)}`}</td>
              ${Object.keys(actual).length > 0 && html`<td>${actual[part.name] === undefined ? "–" : bareGib(actual[part.name], 2)}</td>`}
              <td class="muted">${t(`basis.${part.basis}`)}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </section>
  `;
}

function Cache({ cache }) {
  if (!cache || cache.tokens == null) return null;
  return html`<p class="facts">${t("load.cache", { bytes: gib(cache.available_bytes), tokens: cache.tokens })}${cache.max_concurrency != null && cache.max_model_len != null ? t("load.concurrency", { n: number(cache.max_concurrency, 1), context: cache.max_model_len }) : ""}</p>`;
}

/** How evenly the cards are used: the least and the most of them. */
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
