import { html } from "./html.js";
import { problemWords } from "./api.js";
import { runVerify } from "./deployment.js";
import { seconds } from "./format.js";
import { known, t } from "./i18n.js";
import { Icon } from "./icons.js";
import { use } from "./state.js";

const MARKS = { passed: "check", failed: "close" };

export function Checklist() {
  const verify = use((s) => s.verify);
  const failed = verify.steps.filter((one) => one.status === "failed").length;
  const verdict = verify.ok === true ? "passed" : verify.ok === false ? "failed" : "undecided";
  return html`
    <section class="checklist">
      <p class="muted">${t("check.help")}</p>
      <button type="button" disabled=${verify.running} onClick=${runVerify}>${t(verify.running ? "check.running" : "check.run")}</button>
      <div aria-live="polite">
        ${verify.error && html`<p class="problem" role="alert">${problemWords(verify.error)}</p>`}
        ${verify.ended && !verify.running && html`<p class=${`verdict ${verdict}`}>${t(`check.${verdict}`, { n: failed })}</p>`}
      </div>
      <ol class="steps">
        ${verify.steps.map(
          (one) => html`<li key=${one.name} class=${one.status}>
            <span class="mark"><${Icon} name=${MARKS[one.status] ?? "more"} /></span>
            <div>
              <p><strong>${known(`step.${one.name}`) ? t(`step.${one.name}`) : one.name}</strong> <span class="muted">${t(`status.${one.status}`)}${one.seconds > 0 ? ` · ${seconds(one.seconds)}` : ""}</span></p>
              <p class="muted detail">${one.detail}</p>
            </div>
          </li>`,
        )}
      </ol>
    </section>
  `;
}
