import { html } from "./html.js";
import { useEngine } from "./engine.js";

export function StateDot() {
  const engine = useEngine();
  return html`<span class=${`state ${engine.kind}`} title=${engine.detail ?? engine.label}>
    <span class="dot" aria-hidden="true"></span><span class="word">${engine.label}</span>
  </span>`;
}
