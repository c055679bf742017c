// How much of the context and how many of the allowed pictures a conversation uses, before the limit is hit.
import { tokens } from "./picture.js";

const AROUND = 8; // tokens that a chat template puts around a turn

/** A rough count for text that no engine has counted yet: about 4 Latin letters or 1.5 Chinese characters a token. */
export function guessTokens(text) {
  const wide = (text.match(/[\u2e80-\u9fff\uac00-\ud7af\uff00-\uffef]/g) ?? []).length;
  return Math.ceil(wide / 1.5 + (text.length - wide) / 4);
}

const pictureTokens = (pictures, model) => (pictures ?? []).reduce((sum, one) => sum + (tokens(one.width, one.height, model) ?? 0), 0);

/** {tokens, measured, limit, share, pictures, most}: of the conversation with the draft. ``tokens`` null: unknown. */
export function budget(messages, draft, model) {
  let counted = 0;
  let from = 0;
  messages.forEach((message, index) => {
    const numbers = message.numbers;
    if (message.role === "assistant" && numbers?.prompt_tokens != null) {
      counted = numbers.prompt_tokens + (numbers.completion_tokens ?? 0);
      from = index + 1;
    }
  });
  const measured = from === messages.length && from > 0 && !draft.text && draft.pictures.length === 0;
  let sum = counted;
  for (const message of messages.slice(from)) sum += guessTokens(message.text) + pictureTokens(message.pictures, model) + AROUND;
  const ready = draft.pictures.filter((one) => one.prepared && one.state === "ready").map((one) => one.prepared);
  if (draft.text || ready.length > 0) sum += guessTokens(draft.text) + pictureTokens(ready, model) + AROUND;
  const shown = messages.reduce((n, one) => n + (one.pictures?.length ?? 0), ready.length);
  const limit = model?.context_tokens ?? null;
  return { tokens: sum, measured, limit, share: limit ? sum / limit : null, pictures: shown, most: model?.max_images ?? null };
}
