import { html, useEffect, useState } from "./html.js";
import { Checklist } from "./checklist.js";
import { useEngine } from "./engine.js";
import { Findings } from "./findings.js";
import { t } from "./i18n.js";
import { IconButton } from "./icons.js";
import { LoadSheet } from "./loadsheet.js";
import { Log } from "./log.js";
import { store, TABS, use } from "./state.js";
import { remember } from "./storage.js";

function Live() {
  const [View, setView] = useState(null);
  useEffect(() => {
    import("./live.js").then((module) => setView(() => module.Live));
  }, []);
  return View && html`<${View} />`;
}

const VIEWS = { load: LoadSheet, live: Live, log: Log, check: Checklist };

export function Panel() {
  const open = use((s) => s.right);
  const tab = use((s) => s.tab);
  const session = use((s) => s.session);
  const engine = useEngine();
  if (!open) return null;
  const close = () => {
    remember("right", "closed");
    store.set({ right: false });
    document.querySelector("[aria-controls=panel]")?.focus();
  };
  const choose = (name) => {
    remember("tab", name);
    store.set({ tab: name });
  };
  const keys = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const next = TABS[(TABS.indexOf(tab) + by + TABS.length) % TABS.length];
    choose(next);
    document.getElementById(`tab-${next}`)?.focus();
  };
  const View = VIEWS[tab];
  return html`
    <aside class="panel" id="panel" aria-label=${t("panel")} onKeyDown=${(e) => e.key === "Escape" && close()}>
      <header>
        <div>
          <h2>${session?.deployment ?? t("panel")}</h2>
          <p class=${`state ${engine.kind}`}><span class="dot" aria-hidden="true"></span>${engine.label}${engine.detail ? ` · ${engine.detail}` : ""}</p>
        </div>
        <${IconButton} icon="close" label=${t("close")} onClick=${close} />
      </header>
      <div class="tabs" role="tablist" aria-label=${t("panel")} onKeyDown=${keys}>
        ${TABS.map(
          (name) => html`<button key=${name} id=${`tab-${name}`} type="button" role="tab" aria-selected=${name === tab} aria-controls="view" tabindex=${name === tab ? 0 : -1} onClick=${() => choose(name)}>
            ${t(`tab.${name}`)}
          </button>`,
        )}
      </div>
      <div class="view" id="view" role="tabpanel" aria-labelledby=${`tab-${tab}`} tabindex="0">
        <${View} />
        ${(tab === "load" || tab === "live") && html`<${Findings} />`}
      </div>
    </aside>
  `;
}
