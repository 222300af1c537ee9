// The server's API, and its failures in plain words.

/** What went wrong, and what to do about it. */
export class Failure extends Error {
  constructor(title, advice, more = {}) {
    super(title);
    Object.assign(this, { advice, waitSeconds: null, wantsKey: false }, more);
  }
}

/** The model's name and the size of its context in tokens. */
export async function model() {
  const { data: [{ id, context_length: context }] } = await (await ask('v1/models', {})).json();
  return { id, context };
}

/** The chunks of a streamed chat completion. Throws a `Failure`, or an `AbortError` once `signal` says so. */
export async function* chat(body, signal) {
  const response = await ask('v1/chat/completions', {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({
      ...body, stream: true, stream_options: { include_usage: true }, return_progress: true,
    }),
    signal,
  });
  for await (const data of events(response)) {
    if (data === '[DONE]') return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Failure('The answer broke off.', sentence(chunk.error.message));
    yield chunk;
  }
  throw gone('The connection broke off before the answer’s end.');
}

/** The data of server-sent events; the server writes each in one line. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw error.name === 'AbortError' ? error : gone('The connection broke off before the answer’s end.');
      });
      if (done) return;
      const lines = (rest + value).split('\n');
      rest = lines.pop();
      for (const line of lines) if (line.startsWith('data: ')) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const KEY = 'lily.key';

/** Keeps the key of the server as long as the tab is open. */
export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

async function ask(path, options) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === 'AbortError' ? error : gone('The server cannot be reached.');
  });
  if (!response.ok) throw await refusal(response, key);
  return response;
}

function gone(title) {
  return new Failure(title, 'Is “lily serve” still running? Start it again if it is not; nothing of this chat is lost.');
}

async function refusal(response, key) {
  const error = (await response.json().catch(() => ({}))).error ?? {};
  const said = sentence(error.message ?? `The server answered with status ${response.status}`);
  const waitSeconds = Number(response.headers.get('Retry-After')) || 5;
  if (response.status === 401) {
    return new Failure('The server asks for its API key.', 'It is what --api-key or LILY_API_KEY was when the server was started.',
      { wantsKey: true, hadKey: Boolean(key) });
  }
  if (response.status === 429) return new Failure('The server is busy with other requests.', '', { waitSeconds });
  if (response.status === 503) return new Failure('The server takes no requests now.', '', { waitSeconds });
  if (error.code === 'context_length_exceeded') {
    return new Failure('This chat is longer than the model’s context.', `Shorten a message, or start a new chat. ${said}`);
  }
  if (response.status >= 500) return new Failure('The server could not answer.', said);
  return new Failure('The server refused the request.', said);
}

/** Names of fields stay as they are. */
function sentence(text) {
  const start = /^[\w.[\]]+:/.test(text) ? text[0] : text[0].toUpperCase();
  return start + text.slice(1) + (/[.!?]$/.test(text) ? '' : '.');
}
