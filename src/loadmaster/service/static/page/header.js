// Above the chat: the model, how much of its context and pictures is used, and what has to be known now.
import { html } from "./html.js";
import { budget } from "./budget.js";
import { useDraft } from "./drafts.js";
import { useEngine } from "./engine.js";
import { number, percent } from "./format.js";
import { t } from "./i18n.js";
import { IconButton } from "./icons.js";
import { FixLine } from "./findings.js";
import { model, store, use } from "./state.js";
import { remember } from "./storage.js";

const NEARLY = 0.85;

export function Header() {
  const session = use((s) => s.session);
  const left = use((s) => s.left);
  const right = use((s) => s.right);
  const title = use((s) => s.current?.title);
  const models = session?.models ?? [];
  const toggleRight = () => {
    remember("right", right ? "closed" : "open");
    store.set({ right: !right });
  };
  const choose = (event) => {
    remember("model", event.currentTarget.value);
    store.set({ session: { ...session } });
  };
  return html`
    <header class="top">
      <${IconButton} icon="menu" class="icon-button only-narrow" label=${t("list.title")} aria-expanded=${left} onClick=${() => store.set({ left: !left })} />
      <div class="what">
        <h1 class="title">${title || t("list.new")}</h1>
        <p class="facts">
          ${models.length > 1
            ? html`<select aria-label=${t("model")} value=${model()?.id} onChange=${choose}>${models.map((one) => html`<option value=${one.id}>${one.id}</option>`)}</select>`
            : html`<span class="model">${models[0]?.id ?? t("model.none")}</span>`}
          <${Use} />
        </p>
      </div>
      <${IconButton} icon="panel" label=${t("panel")} aria-expanded=${right} aria-controls="panel" onClick=${toggleRight} />
    </header>
  `;
}

const NONE = [];

function useBudget() {
  const messages = use((s) => s.current?.messages) ?? NONE;
  use((s) => s.session);
  return budget(messages, useDraft((d) => d), model());
}

function Use() {
  const used = useBudget();
  const near = used.share !== null && used.share > NEARLY;
  return html`
    <span class=${near ? "use near" : "use"}>
      ${used.limit !== null &&
      html`<span class="meter" role="meter" aria-label=${t("context")} aria-valuemin="0" aria-valuemax=${used.limit} aria-valuenow=${Math.min(used.tokens, used.limit)}>
        <span style=${{ width: `${Math.min(100, used.share * 100)}%` }}></span>
      </span>`}
      <span>${used.limit === null ? t("context.unknown", { n: used.tokens }) : t(used.measured ? "context.used" : "context.about", { n: used.tokens, limit: used.limit })}</span>
      ${(used.pictures > 0 || used.most !== null) &&
      html`<span class=${used.most !== null && used.pictures >= used.most ? "full" : ""}>
        ${used.most === null ? t("pictures.used", { n: used.pictures }) : t("pictures.used_of", { n: used.pictures, most: number(used.most) })}
      </span>`}
    </span>
  `;
}

export function Banner() {
  const engine = useEngine();
  const session = use((s) => s.session);
  const plan = use((s) => s.plan);
  const snapshot = use((s) => s.snapshot);
  const used = useBudget();
  const missing = (plan?.gpus?.length ?? 0) - (snapshot?.cards?.length ?? Infinity);
  const lines = [];
  if (engine.kind === "down" || engine.kind === "busy") {
    lines.push(html`<${Line} kind=${engine.kind === "down" ? "problem" : "warning"} title=${engine.label} text=${engine.detail} key="engine">
      ${engine.finding
        ? html`<p>${engine.finding.cause || engine.finding.title}</p>
            ${(engine.finding.fixes ?? []).slice(0, 1).map((fix) => html`<${FixLine} fix=${fix} />`)}`
        : engine.state !== "away" && html`<p>${engine.words || t(engine.kind === "busy" ? "engine.busy.help" : "engine.down.help")}</p>`}
      ${engine.kind === "busy" && engine.state !== "away" && html`<p class="muted">${t("engine.may_type")}</p>`}
    <//>`);
  }
  if (session?.read_only) lines.push(html`<${Line} kind="warning" title=${t("read_only")} text=${t("read_only.help")} key="disk" />`);
  if (missing > 0 && Number.isFinite(missing)) {
    lines.push(html`<${Line} kind="problem" title=${t("cards.missing", { n: missing })} text=${t("cards.missing.help", { planned: plan.gpus.length, n: snapshot.cards.length })} key="cards" />`);
  }
  if (used.most !== null && used.most > 0 && used.pictures > used.most) {
    lines.push(html`<${Line} kind="warning" title=${t("pictures.older", { n: used.most })} text=${t("pictures.older.help")} key="pictures" />`);
  }
  if (used.share !== null && used.share > NEARLY) {
    const over = used.share > 1;
    lines.push(html`<${Line} kind="warning" title=${t(over ? "context.over" : "context.nearly", { share: percent(used.share) })} text=${t("context.nearly.help")} key="context" />`);
  }
  return html`<div class="banners" aria-live="polite">${lines}</div>`;
}

const Line = ({ kind, title, text, children }) => html`
  <div class=${`banner ${kind}`}>
    <p><strong>${title}</strong>${text && html`<span> ${text}</span>`}</p>
    ${children}
  </div>
`;
