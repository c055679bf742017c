// Server-sent events of a fetch answer. EventSource can neither POST nor be stopped with a reason.

/** Calls ``onEvent(name, data)`` for each event until the stream ends; data is parsed JSON. */
export async function readEvents(response, onEvent) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    let from = 0;
    while ((end = boundary(rest, from)) !== null) {
      deliver(rest.slice(from, end[0]), onEvent);
      from = end[1];
    }
    rest = rest.slice(from);
  }
}

/** Where the event that begins at ``from`` ends, and where the next begins. */
function boundary(text, from) {
  const at = text.indexOf("\n\n", from);
  const other = text.indexOf("\r\n\r\n", from);
  if (other !== -1 && (at === -1 || other < at)) return [other, other + 4];
  return at === -1 ? null : [at, at + 2];
}

function deliver(block, onEvent) {
  let name = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
  }
  if (data.length === 0) return;
  onEvent(name, JSON.parse(data.join("\n")));
}
