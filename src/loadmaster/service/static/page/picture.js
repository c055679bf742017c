// Pictures before they are sent: read, turned upright, cropped, scaled to the server's cap, named by their content.
import { sha256 } from "./sha256.js";

export const MOST_FILE_BYTES = 200 * 2 ** 20; // a browser tab decodes no larger file safely
const MOST_PIXELS = 2 ** 28; // a canvas holds no more
const LOSSLESS_BYTES = 4 * 2 ** 20; // a larger PNG is a photograph: sent as JPEG
const QUALITY = 0.92;
const LEAST_SIDE = 4; // pixels, and how many times longer the longer side may be: the gateway's rules
const MOST_RATIO = 200;

export class PictureError extends Error {
  constructor(code, values = {}) {
    super(code);
    this.code = code;
    this.values = values;
  }
}

/** Size and tokens of a picture after scaling to the model's limits; tokens null: the model's rule is not known. */
export function fitted(width, height, model) {
  const side = model?.patch ? model.patch.size * (model.patch.merge ?? 1) : null;
  const cap = model?.max_pixels ?? null;
  let [w, h] = [width, height];
  if (cap !== null && width * height > cap) {
    const shrink = Math.sqrt((width * height) / cap);
    [w, h] = [width / shrink, height / shrink];
    if (side !== null) [w, h] = [Math.max(1, Math.floor(w / side)) * side, Math.max(1, Math.floor(h / side)) * side];
    [w, h] = [Math.max(1, Math.floor(w)), Math.max(1, Math.floor(h))];
  }
  return { width: w, height: h, tokens: tokens(w, h, model) };
}

/** Tokens of a picture of this size: whole merged patches within the processor's limits. */
export function tokens(width, height, model) {
  if (!model?.patch?.size) return null;
  const side = model.patch.size * (model.patch.merge ?? 1);
  let columns = Math.max(1, Math.round(width / side));
  let rows = Math.max(1, Math.round(height / side));
  const smallest = model.patch.min_pixels ?? null;
  if (smallest !== null && columns * rows * side * side < smallest) {
    const grow = Math.sqrt(smallest / (width * height));
    columns = Math.ceil((width * grow) / side);
    rows = Math.ceil((height * grow) / side);
  }
  return columns * rows;
}

/** Decode a file. Raises PictureError: empty, too_large, not_a_picture, too_many_pixels. The caller closes the bitmap. */
export async function decode(blob) {
  if (blob.size === 0) throw new PictureError("empty");
  if (blob.size > MOST_FILE_BYTES) throw new PictureError("too_large", { bytes: blob.size });
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob, { imageOrientation: "from-image" });
  } catch {
    throw await unreadable(blob);
  }
  if (bitmap.width * bitmap.height > MOST_PIXELS) {
    const { width, height } = bitmap;
    bitmap.close();
    throw new PictureError("too_many_pixels", { width, height });
  }
  return bitmap;
}

async function unreadable(blob) {
  const start = new DataView(await blob.slice(0, 512).arrayBuffer());
  const text = new TextDecoder("latin1").decode(start);
  if (text.startsWith("PNG", 1) && start.byteLength >= 24) {
    const [width, height] = [start.getUint32(16), start.getUint32(20)];
    if (width * height > MOST_PIXELS) return new PictureError("too_many_pixels", { width, height });
  }
  if (/^....ftyp(hei|hev|mif1|msf1)/s.test(text)) return new PictureError("heic");
  return new PictureError(text.includes("<svg") ? "svg" : "not_a_picture");
}

/** ``area``: what is cut out, {x, y, width, height} in pixels of the bitmap. Halved step by step, so that lines stay. */
function scaled(bitmap, area, width, height) {
  let source = bitmap;
  let from = area;
  for (;;) {
    const step = { width: Math.max(width, Math.ceil(from.width / 2)), height: Math.max(height, Math.ceil(from.height / 2)) };
    const canvas = document.createElement("canvas");
    canvas.width = step.width;
    canvas.height = step.height;
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(source, from.x, from.y, from.width, from.height, 0, 0, step.width, step.height);
    if (source !== bitmap) source.width = source.height = 0;
    source = canvas;
    from = { x: 0, y: 0, width: step.width, height: step.height };
    if (step.width === width && step.height === height) return canvas;
  }
}

const encoded = (canvas, type, quality) => new Promise((resolve) => canvas.toBlob(resolve, type, quality));

/**
 * What is sent for a file: {blob, sha256, width, height, original_width, original_height, bytes, tokens, area}.
 * Writing the pixels anew leaves behind what the file says besides: place, camera, thumbnails.
 */
export async function prepare(file, model, area = null) {
  const bitmap = await decode(file);
  try {
    const original = { original_width: bitmap.width, original_height: bitmap.height, bytes: file.size };
    const cut = area ?? { x: 0, y: 0, width: bitmap.width, height: bitmap.height };
    const size = fitted(cut.width, cut.height, model);
    const [short, long] = [Math.min(size.width, size.height), Math.max(size.width, size.height)];
    if (short < LEAST_SIDE || long / short > MOST_RATIO) throw new PictureError(Math.min(cut.width, cut.height) < LEAST_SIDE && long / short < MOST_RATIO ? "too_small" : "too_narrow", { width: cut.width, height: cut.height });
    const canvas = scaled(bitmap, cut, size.width, size.height);
    let blob = null;
    if (file.type === "image/png" || file.type === "image/gif") blob = await encoded(canvas, "image/png");
    if (blob === null || blob.size > LOSSLESS_BYTES) blob = await encoded(onWhite(canvas), "image/jpeg", QUALITY);
    canvas.width = canvas.height = 0;
    if (blob === null) throw new PictureError("too_many_pixels", size);
    return { ...original, ...size, blob, area, sent_bytes: blob.size, sha256: await sha256(blob) };
  } finally {
    bitmap.close();
  }
}

function onWhite(canvas) {
  const context = canvas.getContext("2d");
  context.globalCompositeOperation = "destination-over";
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  return canvas;
}
