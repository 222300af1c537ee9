// The chat: messages, the answer in progress, settings. See api.js for the server and markdown.js for how text is shown.

import { Failure, chat, keepKey, model } from './api.js';
import { Markdown, copyButton, element } from './markdown.js';

const find = (id) => document.getElementById(id);
const draft = find('draft');

/** What the browser keeps; without storage the page works until it is closed. */
const store = {
  read(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`lily.${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  write(name, value) {
    try {
      localStorage.setItem(`lily.${name}`, JSON.stringify(value));
    } catch {
      find('status').textContent = 'The browser has no room to keep this chat.';
    }
  },
};

// {role, content}; those of the assistant also have {reasoning, stats, tokens}.
let messages = store.read('messages', []);
let settings = store.read('settings', { thinking: true });
// The answer in progress: {abort, over}.
let running = null;
let contextTokens = null;

const save = () => store.write('messages', messages);

// ---- Asking and answering

/** Sends `text` as the message at `index`; what came behind it is forgotten. */
async function send(text, index = messages.length) {
  await stop();
  messages.length = index;
  messages.push({ role: 'user', content: text });
  draw();
  await answer();
}

/** Has the last message of the user answered, again if it was. */
async function again() {
  await stop();
  if (messages.at(-1)?.role === 'assistant') messages.pop();
  draw();
  await answer();
}

async function stop() {
  running?.abort.abort();
  await running?.over;
}

async function answer() {
  save();
  notice(null);
  const abort = new AbortController();
  const over = attempts(abort.signal);
  running = { abort, over };
  showRunning();
  await over;
  running = null;
  showRunning();
  save();
}

/** Asks until there is an answer: servers may be busy, or want a key. */
async function attempts(signal) {
  scrollDown();
  for (;;) {
    const message = { role: 'assistant', content: '', reasoning: '' };
    const failure = await receive(message, signal).catch((error) => error);
    const isEmpty = !message.content && !message.reasoning;
    if (signal.aborted || !(failure instanceof Error)) return;
    if (isEmpty && failure.waitSeconds) {
      if (!await wait(failure, signal)) return notice(null);
    } else if (!failure.wantsKey || !await askForKey(failure.hadKey)) {
      if (!(failure instanceof Failure)) console.error(failure);
      return notice(failure);
    }
  }
}

/** Streams an answer into `message` and onto the page. */
async function receive(message, signal) {
  const request = {
    messages: history(), ...sampling(), chat_template_kwargs: { enable_thinking: settings.thinking },
  };
  const view = answerView(message, true);
  view.progress('Waiting …');
  find('messages').append(view.root);
  scrollDown();
  const pace = { pieces: 0, since: 0 };
  try {
    for await (const chunk of chat(request, signal)) {
      const delta = chunk.choices[0]?.delta ?? {};
      if (chunk.prompt_progress) view.progress(reading(chunk.prompt_progress));
      if (delta.reasoning_content || delta.content) {
        if (!messages.includes(message)) messages.push(message);
        message.reasoning += delta.reasoning_content ?? '';
        message.content += delta.content ?? '';
        pace.since ||= performance.now();
        pace.pieces += 1;
        message.stats = live(pace);
        view.soon();
      }
      if (chunk.timings) message.timings = chunk.timings;
      if (chunk.choices[0]?.finish_reason === 'length') message.isCut = true;
      if (chunk.usage) finish(message, chunk.usage);
    }
    find('status').textContent = 'The answer is complete.';
  } finally {
    delete message.timings;
    if (signal.aborted) message.stats = `Stopped${message.stats ? ` · ${message.stats}` : ''}`;
    if (messages.includes(message)) keepDown(() => view.show(false)); else view.root.remove();
    showContext();
  }
}

/** What is sent of the chat. Thinking of earlier turns is not: the model is not meant to see it. */
function history() {
  const system = settings.system?.trim() ? [{ role: 'system', content: settings.system }] : [];
  return [...system, ...messages.map(({ role, content }) => ({ role, content }))];
}

function sampling() {
  const { system, thinking, ...numbers } = settings;
  return numbers;
}

// ---- Counts

const grouped = (number) => number.toLocaleString('en-US');
const perSecond = (rate) => (rate >= 1000 ? grouped(Math.round(rate)) : rate.toFixed(1));
const reading = ({ processed, total }) => `Reading ${grouped(processed)} of ${grouped(total)} tokens …`;

/** A piece of a stream is a token, but where a character takes several. */
function live({ pieces, since }) {
  const seconds = (performance.now() - since) / 1000;
  const rate = seconds > 0.2 ? ` · ${perSecond((pieces - 1) / seconds)} tok/s` : '';
  return `${grouped(pieces)} tokens${rate}`;
}

function finish(message, usage) {
  const { prompt_tokens: prompt, completion_tokens: tokens } = usage;
  const cached = usage.prompt_tokens_details.cached_tokens;
  const rate = message.timings?.predicted_per_second;
  message.stats = [
    `${grouped(tokens)} ${tokens === 1 ? 'token' : 'tokens'}`,
    ...(rate ? [`${perSecond(rate)} tok/s`] : []),
    `${grouped(cached)} of ${grouped(prompt)} prompt tokens cached`,
    ...(message.isCut ? ['cut at the limit of tokens'] : []),
  ].join(' · ');
  message.tokens = prompt + tokens;
}

function showContext() {
  const used = messages.findLast((message) => message.tokens)?.tokens ?? 0;
  find('context').hidden = !contextTokens || !used;
  if (!contextTokens) return;
  find('count').textContent = `${grouped(used)} of ${grouped(contextTokens)} tokens`;
  find('fill').style.width = `${Math.min(100, 100 * used / contextTokens)}%`;
}

// ---- The page

function draw() {
  const list = find('messages');
  list.replaceChildren(...messages.map((message, index) => (
    message.role === 'user' ? userView(message, index) : answerView(message).root
  )));
  find('empty').hidden = messages.length > 0;
  find('bring-back').hidden = !store.read('last', []).length;
  showContext();
}

function userView(message, index) {
  const root = element('li', { className: 'user' });
  const actions = element('div', { className: 'actions' }, copyButton(() => message.content), quiet('Edit', edit));
  root.append(element('h2', { className: 'for-readers' }, 'You'), element('p', { className: 'bubble' }, message.content), actions);
  return root;

  function cancel() {
    draw();
    draft.focus();
  }

  function edit() {
    const text = element('textarea', { value: message.content, ariaLabel: 'Edited message', enterKeyHint: 'send' });
    const form = element('form', { className: 'bubble' }, text, element('div', { className: 'buttons' },
      element('button', { type: 'button', onclick: cancel }, 'Cancel'),
      element('button', { className: 'main' }, 'Send')));
    form.onsubmit = (event) => {
      event.preventDefault();
      if (text.value.trim()) send(text.value.trim(), index);
    };
    text.onkeydown = (event) => {
      if (event.key === 'Escape' && !running) cancel();
      sendOnEnter(event);
    };
    text.oninput = () => fit(text);
    root.replaceChildren(form);
    root.classList.add('edited');
    fit(text);
    text.focus();
  }
}

/**
 * An answer on the page. Its thinking is open while it is written, closes when the content begins, and then is as the
 * reader likes.
 */
function answerView(message, isNew = false) {
  const summary = element('summary');
  const thought = element('div', { className: 'text' });
  const details = element('details', { open: isNew }, summary, thought);
  const content = element('div', { className: 'text' });
  const stats = element('span', { className: 'stats' });
  const root = element('li', { className: 'assistant' }, element('h2', { className: 'for-readers' }, 'lily'), details, content,
    element('div', { className: 'actions' }, copyButton(() => message.content), quiet('Regenerate', again), stats));
  const [shownThought, shownContent] = [new Markdown(thought), new Markdown(content)];
  let frame = 0, wasThinking = false;

  function show(isRunning) {
    cancelAnimationFrame(frame);
    frame = 0;
    const isThinking = isRunning && !message.content;
    root.classList.toggle('thinking', isThinking);
    details.hidden = !message.reasoning;
    summary.textContent = isThinking ? 'Thinking …' : 'Thought';
    if (wasThinking && message.content) details.open = false;
    wasThinking = isThinking;
    shownThought.show(message.reasoning);
    shownContent.show(message.content);
    stats.textContent = message.stats ?? '';
  }
  show(isNew);
  return {
    root,
    show,
    progress(text) { stats.textContent = text; },
    /** Shows what came since the last frame, with the next one. */
    soon() { frame ||= requestAnimationFrame(() => keepDown(() => show(true))); },
  };
}

const quiet = (text, onclick) => element('button', { type: 'button', className: 'quiet', onclick }, text);

const box = find('scroll');
// Whether the end of the chat is in view, as the user last left it.
let isDown = true;
box.onscroll = () => { isDown = box.scrollHeight - box.scrollTop - box.clientHeight < 60; };
// The keyboard of a phone takes room.
new ResizeObserver(() => keepDown(() => {})).observe(box);

/** Changes the page; if its end was in view, it stays so. */
function keepDown(change) {
  change();
  if (isDown) scrollDown();
}

function scrollDown() {
  box.scrollTop = box.scrollHeight;
}

function fit(text) {
  text.style.height = 'auto';
  text.style.height = `${text.scrollHeight}px`;
}

function showRunning() {
  find('send').hidden = Boolean(running);
  find('stop').hidden = !running;
  document.body.classList.toggle('running', Boolean(running));
}

/** Shows what went wrong below the chat; `null`: nothing. */
function notice(failure, canRetry = true) {
  find('notice').hidden = !failure;
  if (!failure) return;
  find('notice-title').textContent = failure.advice === undefined ? 'The page has an error of its own.' : failure.message;
  find('notice-advice').textContent = failure.advice ?? failure.message;
  find('again').hidden = !canRetry;
  scrollDown();
}

/** Waits as the server asked; false if the user stopped it. */
async function wait(failure, signal) {
  for (let left = failure.waitSeconds; left > 0 && !signal.aborted; left -= 1) {
    notice({ message: failure.message, advice: `Trying again in ${left} s.` }, false);
    await new Promise((done) => {
      const timer = setTimeout(done, 1000);
      signal.addEventListener('abort', () => { clearTimeout(timer); done(); }, { once: true });
    });
  }
  notice(null);
  return !signal.aborted;
}

/** Whether the user gave a key. */
function askForKey(wasWrong) {
  const dialog = find('key');
  const field = dialog.querySelector('input');
  find('key-reason').textContent = wasWrong
    ? 'The key that it was given is wrong.'
    : 'It is what --api-key or LILY_API_KEY was when the server was started.';
  field.value = '';
  dialog.returnValue = '';
  dialog.showModal();
  return new Promise((done) => {
    dialog.onclose = () => done(dialog.returnValue === 'given');
    dialog.querySelector('form').onsubmit = (event) => {
      event.preventDefault();
      keepKey(field.value.trim());
      dialog.close('given');
    };
  });
}

// ---- What the user does

function sendOnEnter(event) {
  // While an input method composes, Enter is its own.
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}

find('composer').onsubmit = (event) => {
  event.preventDefault();
  const text = draft.value.trim();
  if (!text || running) return;
  draft.value = '';
  fit(draft);
  send(text);
};
draft.onkeydown = sendOnEnter;
draft.oninput = () => fit(draft);
find('stop').onclick = stop;
find('again').onclick = again;
document.onkeydown = (event) => {
  if (event.key === 'Escape' && running && !document.querySelector('dialog[open]')) stop();
};

find('new-chat').onclick = async () => {
  await stop();
  if (messages.length) store.write('last', messages);
  messages = [];
  save();
  notice(null);
  draw();
  draft.focus();
};
find('bring-back').onclick = () => {
  messages = store.read('last', []);
  save();
  draw();
  scrollDown();
};

const form = find('settings').querySelector('form');

function showSettings() {
  for (const field of form.elements) if (field.name) field.value = settings[field.name] ?? '';
  find('thinking').checked = settings.thinking;
}

find('open-settings').onclick = () => find('settings').showModal();
find('thinking').onchange = () => {
  settings.thinking = find('thinking').checked;
  store.write('settings', settings);
};
form.oninput = () => {
  settings = { thinking: settings.thinking };
  for (const { name, type, value } of form.elements) {
    if (name && value) settings[name] = type === 'number' ? Number(value) : value;
  }
  store.write('settings', settings);
};
form.onsubmit = (event) => {
  event.preventDefault();
  find('settings').close();
};
find('empty-all').onclick = () => {
  form.reset();
  form.oninput();
};
find('no-key').onclick = () => find('key').close();
for (const dialog of document.querySelectorAll('dialog')) {
  dialog.onclick = (event) => { if (event.target === dialog) dialog.close(); };
}
// An answer that is cut by leaving the page is there when the user comes back.
window.addEventListener('pagehide', save);

async function greet() {
  showSettings();
  draw();
  scrollDown();
  try {
    const { id, context } = await model();
    contextTokens = context;
    find('model').textContent = id;
    showContext();
  } catch (failure) {
    if (failure.wantsKey && await askForKey(failure.hadKey)) return greet();
    notice(failure, false);
  }
}

greet();
