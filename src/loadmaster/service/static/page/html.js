// htm bound to Preact: components write html`<div>…</div>`.
import { h, render, createElement, Fragment } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export const html = htm.bind(h);
export { render, createElement, Fragment };
export { useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback } from "../vendor/hooks.js";
