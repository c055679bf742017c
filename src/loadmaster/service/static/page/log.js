import { html, useEffect, useRef } from "./html.js";
import { copy } from "./clipboard.js";
import { t } from "./i18n.js";
import { Icon } from "./icons.js";
import { use } from "./state.js";

const lineText = (line) => (typeof line === "string" ? line : (line.text ?? ""));
const grave = (text) => (/\b(ERROR|CRITICAL|FATAL|Traceback|error:)/.test(text) ? "error" : /\bWARN(ING)?\b/.test(text) ? "warning" : "");

export function Log() {
  const lines = use((s) => s.log);
  const root = useRef(null);
  const atEnd = useRef(true);
  useEffect(() => {
    if (atEnd.current && root.current) root.current.scrollTop = root.current.scrollHeight;
  }, [lines]);
  if (lines.length === 0) return html`<p class="muted empty">${t("log.none")}</p>`;
  const scrolled = () => {
    const { scrollTop, scrollHeight, clientHeight } = root.current;
    atEnd.current = scrollHeight - scrollTop - clientHeight < 24;
  };
  return html`
    <section class="log">
      <div class="row end"><button type="button" class="quiet small" onClick=${() => copy(lines.map(lineText).join("\n"))}><${Icon} name="copy" />${t("log.copy")}</button></div>
      <pre ref=${root} onScroll=${scrolled} tabindex="0" aria-label=${t("tab.log")}>${lines.map((line) => html`<span class=${grave(lineText(line))}>${lineText(line)}${"\n"}</span>`)}</pre>
    </section>
  `;
}
