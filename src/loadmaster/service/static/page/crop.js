// Cutting out the part of a picture that matters: fewer tokens, shown while one drags or uses the arrow keys.
import { html, useEffect, useRef, useState } from "./html.js";
import { Dialog } from "./dialog.js";
import { cropPicture } from "./drafts.js";
import { number } from "./format.js";
import { t } from "./i18n.js";
import { decode, fitted } from "./picture.js";
import { model } from "./state.js";

const LEAST = 16; // pixels of a side
const EDGES = ["nw", "ne", "sw", "se"];

export function Crop({ one, onClose }) {
  const canvas = useRef(null);
  const [full, setFull] = useState(null); // {width, height} of the upright picture
  const [area, setArea] = useState(one.area);
  useEffect(() => {
    let gone = false;
    decode(one.file).then((bitmap) => {
      if (!gone && canvas.current) {
        const scale = Math.min(1, 1200 / Math.max(bitmap.width, bitmap.height));
        canvas.current.width = Math.max(1, Math.round(bitmap.width * scale));
        canvas.current.height = Math.max(1, Math.round(bitmap.height * scale));
        canvas.current.getContext("2d").drawImage(bitmap, 0, 0, canvas.current.width, canvas.current.height);
        setFull({ width: bitmap.width, height: bitmap.height });
      }
      bitmap.close();
    });
    return () => (gone = true);
  }, []);
  const part = useRef(null);
  useEffect(() => part.current?.focus(), [full]);
  const whole = full && { x: 0, y: 0, ...full };
  const now = area ?? whole;
  const drag = (edge) => (event) => {
    event.preventDefault();
    event.stopPropagation();
    const box = canvas.current.getBoundingClientRect();
    const [across, down] = [full.width / box.width, full.height / box.height];
    const begin = { x: event.clientX, y: event.clientY, area: now };
    const target = event.currentTarget;
    target.setPointerCapture(event.pointerId);
    const move = (e) => setArea(moved(begin.area, edge, (e.clientX - begin.x) * across, (e.clientY - begin.y) * down, full));
    target.addEventListener("pointermove", move);
    target.addEventListener("pointerup", () => target.removeEventListener("pointermove", move), { once: true });
  };
  const keys = (edge) => (event) => {
    const step = Math.max(1, Math.round(full.width / 100)) * (event.shiftKey ? 5 : 1);
    const by = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    setArea(moved(now, edge, by[0], by[1], full));
  };
  const use = (chosen) => {
    cropPicture(one.id, chosen);
    onClose();
  };
  const share = (value, of) => `${(value / of) * 100}%`;
  return html`
    <${Dialog} title=${t("crop")} wide=${true} onClose=${onClose}>
      <div class="crop">
        <div class="crop-stage">
          <canvas ref=${canvas} role="img" aria-label=${one.name}></canvas>
          ${full &&
          html`<div ref=${part} class="crop-area" tabindex="0" role="group" aria-label=${t("crop.area", { width: number(now.width), height: number(now.height) })}
            style=${{ left: share(now.x, full.width), top: share(now.y, full.height), width: share(now.width, full.width), height: share(now.height, full.height) }}
            onPointerDown=${drag("all")} onKeyDown=${keys("all")}>
            ${EDGES.map((edge) => html`<button key=${edge} type="button" class=${`handle ${edge}`} aria-label=${t(`crop.${edge}`)} onPointerDown=${drag(edge)} onKeyDown=${keys(edge)}></button>`)}
          </div>`}
        </div>
        ${full && html`<${Saved} before=${fitted(full.width, full.height, model())} after=${fitted(now.width, now.height, model())} area=${now} />`}
        <p class="muted small-text">${t("crop.help")}</p>
        <div class="row end">
          <button type="button" class="quiet" onClick=${() => use(null)}>${t("crop.whole")}</button>
          <button type="button" class="primary" disabled=${!full} onClick=${() => use(area)}>${t("crop.use")}</button>
        </div>
      </div>
    <//>
  `;
}

const Saved = ({ before, after, area }) => html`
  <p class="crop-numbers" aria-live="polite">
    ${`${number(area.width)} × ${number(area.height)} → ${
      before.tokens === null ? t("picture.tokens_unknown") : t(after.tokens === before.tokens ? "picture.tokens" : "crop.tokens", { n: after.tokens, before: before.tokens, after: after.tokens })
    }`}
  </p>
`;

export function moved(area, edge, dx, dy, full) {
  const clamp = (value, low, high) => Math.min(Math.max(Math.round(value), low), high);
  if (edge === "all") {
    return { ...area, x: clamp(area.x + dx, 0, full.width - area.width), y: clamp(area.y + dy, 0, full.height - area.height) };
  }
  let [left, top, right, bottom] = [area.x, area.y, area.x + area.width, area.y + area.height];
  const least = Math.min(LEAST, full.width, full.height);
  if (edge.includes("w")) left = clamp(left + dx, 0, right - least);
  if (edge.includes("e")) right = clamp(right + dx, left + least, full.width);
  if (edge.includes("n")) top = clamp(top + dy, 0, bottom - least);
  if (edge.includes("s")) bottom = clamp(bottom + dy, top + least, full.height);
  return { x: left, y: top, width: right - left, height: bottom - top };
}
