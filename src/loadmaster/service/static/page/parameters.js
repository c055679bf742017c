import { remember, remembered } from "./storage.js";
import { createStore, useStore } from "./store.js";
import { html } from "./html.js";
import { IconButton } from "./icons.js";
import { t } from "./i18n.js";
import { store, use } from "./state.js";

const EMPTY = { temperature: "", max_tokens: "", system: "", thinking: null };

function kept() {
  try {
    return { ...EMPTY, ...JSON.parse(remembered("parameters", "{}")) };
  } catch {
    return { ...EMPTY };
  }
}

const parameters = createStore(kept());
export const useParameters = () => useStore(parameters, (state) => state);

export function setParameters(change) {
  parameters.set(change);
  remember("parameters", JSON.stringify(parameters.get()));
}

export function sentParameters() {
  const { temperature, max_tokens, system, thinking } = parameters.get();
  const sent = {};
  if (temperature !== "") sent.temperature = Number(temperature);
  if (max_tokens !== "") sent.max_tokens = Number(max_tokens);
  if (system.trim()) sent.system = system;
  if (thinking !== null) sent.thinking = thinking;
  return sent;
}

export function ParametersDrawer() {
  const open = use((s) => s.settings);
  const { temperature, max_tokens, system } = useParameters();
  if (!open) return null;
  const close = () => store.set({ settings: false });
  const set = (name) => (event) => setParameters({ [name]: event.currentTarget.value });
  return html`
    <section class="drawer" id="parameters" aria-label=${t("parameters")} onKeyDown=${(e) => e.key === "Escape" && close()}>
      <header>
        <h2>${t("parameters")}</h2>
        <button type="button" class="quiet small" onClick=${() => setParameters(EMPTY)}>${t("parameters.reset")}</button>
        <${IconButton} icon="close" label=${t("close")} onClick=${close} />
      </header>
      <div class="fields">
        <label>
          <span>${t("parameters.temperature")} <output>${temperature === "" ? t("parameters.model_default") : temperature}</output></span>
          <input type="range" min="0" max="2" step="0.05" value=${temperature === "" ? 0.7 : temperature} onInput=${set("temperature")} />
        </label>
        <label>
          <span>${t("parameters.max_tokens")}</span>
          <input type="number" min="1" step="1" inputmode="numeric" placeholder=${t("parameters.model_default")} value=${max_tokens} onInput=${set("max_tokens")} />
        </label>
        <label class="whole">
          <span>${t("parameters.system")}</span>
          <textarea rows="3" placeholder=${t("parameters.system.hint")} value=${system} onInput=${set("system")}></textarea>
        </label>
      </div>
    </section>
  `;
}
