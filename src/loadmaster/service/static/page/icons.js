import { html } from "./html.js";

const PATHS = {
  plus: "M10 4v12M4 10h12",
  close: "M5 5l10 10M15 5L5 15",
  menu: "M3 5h14M3 10h14M3 15h14",
  panel: "M3 4h14v12H3zM12.5 4v12",
  send: "M10 16V4M5 9l5-5 5 5",
  stop: "M6 6h8v8H6z",
  picture: "M3 4h14v12H3zM3 13l4-4 4 4 2-2 4 4M12.5 7.5h.01",
  camera: "M3 6h3l1.5-2h5L14 6h3v10H3zM10 8a3 3 0 100 6 3 3 0 000-6z",
  crop: "M6 2v12h12M2 6h12v12",
  pencil: "M4 16l.7-3.2L13.5 4l2.5 2.5-8.8 8.8z",
  copy: "M7 7h9v9H7zM4 13V4h9",
  again: "M15.5 7A6 6 0 104.4 12M16 3v4h-4",
  more: "M5 10h.01M10 10h.01M15 10h.01",
  sliders: "M4 6h7M15 6h1M4 14h1M9 14h7M13 4v4M7 12v4",
  down: "M10 4v12M5 11l5 5 5-5",
  search: "M9 4a5 5 0 100 10A5 5 0 009 4zM13 13l4 4",
  thought: "M10 3a5 5 0 00-3 9v2h6v-2a5 5 0 00-3-9zM8 17h4",
  forward: "M5 4l7 6-7 6zM15 4v12",
  check: "M4 10l4 4 8-8",
  gear: "M10 7a3 3 0 100 6 3 3 0 000-6zM10 2v3M10 15v3M2 10h3M15 10h3M4.5 4.5l2 2M13.5 13.5l2 2M15.5 4.5l-2 2M6.5 13.5l-2 2",
  out: "M8 4H4v12h4M9 10h8M14 7l3 3-3 3",
};

export const Icon = ({ name }) => html`
  <svg class="icon" viewBox="0 0 20 20" width="20" height="20" aria-hidden="true" focusable="false">
    <path d=${PATHS[name]} fill="none" stroke="currentColor" stroke-width="1.5" stroke-linecap="round" stroke-linejoin="round" />
  </svg>
`;

export const IconButton = ({ icon, label, children, ...rest }) => html`
  <button type="button" class="icon-button" aria-label=${label} title=${label} ...${rest}><${Icon} name=${icon} />${children}</button>
`;
