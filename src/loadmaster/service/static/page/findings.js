import { html } from "./html.js";
import { copy } from "./clipboard.js";
import { t } from "./i18n.js";
import { IconButton } from "./icons.js";
import { use } from "./state.js";

export function fixText(fix) {
  const env = Object.entries(fix.env ?? {}).map(([name, value]) => `${name}=${value}`);
  return fix.command ?? [...env, ...(fix.argv ?? [])].join(" ");
}

export function FixLine({ fix }) {
  const text = fixText(fix);
  return html`
    <div class="fix">
      ${text && html`<code>${text}</code><${IconButton} icon="copy" label=${t("copy")} onClick=${() => copy(text)} />`}
      ${(fix.remove ?? []).length > 0 && html`<p>${t("fix.remove", { flags: fix.remove.join(" ") })}</p>`}
      <p class="muted">${fix.why}${fix.replanned ? html` <span class="tag">${t("fix.replanned")}</span>` : null}</p>
    </div>
  `;
}

export function Findings() {
  const live = use((s) => s.findings);
  const plan = use((s) => s.plan);
  const all = [...live, ...(plan?.findings ?? []).filter((one) => !live.some((other) => other.code === one.code))];
  const grave = all.filter((one) => one.severity !== "note");
  return html`
    <section class=${grave.length > 0 ? "findings grave" : "findings"} aria-label=${t("findings")}>
      <h3>${t("findings")} <span class="count">${grave.length === 0 ? t("findings.none") : t("findings.count", { n: grave.length })}</span></h3>
      ${all.map(
        (one) => html`
          <details class=${`finding ${one.severity}`} key=${one.code} open=${one.severity === "error"}>
            <summary><span class="severity">${t(`severity.${one.severity}`)}</span> ${one.title}</summary>
            <p>${one.cause}</p>
            ${(one.evidence ?? []).slice(0, 3).map((evidence) => html`<p class="evidence">${evidence.source}${evidence.line ? `:${evidence.line}` : ""} <q>${evidence.text}</q></p>`)}
            ${(one.fixes ?? []).map((fix) => html`<${FixLine} fix=${fix} />`)}
            <p class="muted code-name">${one.code}</p>
          </details>
        `,
      )}
    </section>
  `;
}
