// Markdown as models write it, as nodes. Text becomes text nodes and nothing else: no markup of the text is ever parsed as HTML.

/** An element with properties and children; strings are text. */
export function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

/** Shows a text that grows. What did not change since the last call keeps its nodes, so that selections survive. */
export class Markdown {
  #shown = [];

  /** `depth` counts the lists and quotes around it. */
  constructor(root, depth = 0) {
    this.root = root;
    this.depth = depth;
  }

  show(text) {
    const blocks = split(text);
    let same = 0;
    while (same < blocks.length && blocks[same] === this.#shown[same]) same += 1;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    this.root.append(...blocks.slice(same).map((source) => block(source, this.depth)));
    this.#shown = blocks;
  }
}

/** A button that copies what `text()` is then. */
export function copyButton(text) {
  const button = element('button', { type: 'button', className: 'quiet' }, 'Copy');
  button.onclick = async () => {
    let said = 'Copied';
    try {
      await navigator.clipboard.writeText(text());
    } catch {
      // Browsers have no clipboard for pages without TLS from other machines.
      said = 'Not allowed here';
    }
    button.textContent = said;
    setTimeout(() => { button.textContent = 'Copy'; }, 1500);
  };
  return button;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const ROW = /^\s*\|.*\|\s*$/;

/** The sources of a text's blocks: pieces between empty lines, but fences and lists whole. */
function split(text) {
  const blocks = [];
  let lines = [], fence = null, isList = false, isOver = false;
  const end = () => {
    if (lines.length) blocks.push(lines.join('\n').trimEnd());
    [lines, isList, isOver] = [[], false, false];
  };
  for (const line of text.split('\n')) {
    if (fence) {
      lines.push(line);
      if (closes(line, fence)) { fence = null; end(); }
    } else if (isList && line.trim() && (/^\s/.test(line) || ITEM.test(line) || !(isOver || FENCE.test(line) || HEADING.test(line)))) {
      lines.push(line);
      isOver = false;
    } else if (!line.trim()) {
      if (isList) { lines.push(line); isOver = true; } else end();
    } else {
      const opening = FENCE.exec(line);
      if (isOver || opening || HEADING.test(line) || RULE.test(line)) end();
      if (!lines.length && ITEM.test(line) && !RULE.test(line)) isList = true;
      lines.push(line);
      if (opening) fence = opening[1];
      else if (HEADING.test(line) || RULE.test(line)) end();
    }
  }
  end();
  return blocks;
}

const closes = (line, fence) => new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`).test(line);

/** Lists and quotes deeper than this stay as they are written: a model that repeats itself nests without end. */
const DEEPEST = 12;

/** The node of one block. */
function block(source, depth) {
  const lines = source.split('\n');
  const fence = FENCE.exec(lines[0]);
  if (fence) return code(lines, fence);
  const heading = HEADING.exec(lines[0]);
  // The page has the first two levels.
  if (heading) return element(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2]));
  if (RULE.test(source)) return element('hr');
  const nests = depth < DEEPEST;
  if (nests && ITEM.test(lines[0])) return list(lines, depth + 1);
  if (nests && lines.every((line) => line.startsWith('>'))) {
    const quote = element('blockquote');
    new Markdown(quote, depth + 1).show(lines.map((line) => line.replace(/^> ?/, '')).join('\n'));
    return quote;
  }
  if (lines.length > 1 && lines.every((line) => ROW.test(line)) && /^[\s|:-]+$/.test(lines[1])) return table(lines);
  return element('p', {}, ...inline(source));
}

function code(lines, [, fence, info]) {
  const body = lines.slice(1, lines.length > 1 && closes(lines.at(-1), fence) ? -1 : undefined).join('\n');
  const head = element('figcaption', {}, element('span', {}, info.trim().split(/\s/)[0] || 'text'), copyButton(() => body));
  return element('figure', {}, head, element('pre', { tabIndex: 0 }, element('code', {}, body)));
}

/** A list; lines that are indented below an item belong to it. */
function list(lines, depth) {
  const [, indent, marker] = ITEM.exec(lines[0]);
  const isOrdered = /\d/.test(marker);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length) items.push([item[3]]);
    else items.at(-1).push(line);
  }
  const node = element(isOrdered ? 'ol' : 'ul', isOrdered ? { start: parseInt(marker, 10) } : {});
  for (const [first, ...rest] of items) {
    const margin = Math.min(...rest.filter((line) => line.trim()).map((line) => line.search(/\S/)));
    const entry = element('li', {}, ...inline(first));
    const inner = element('div');
    new Markdown(inner, depth).show(rest.map((line) => line.slice(Math.min(margin, line.length))).join('\n'));
    entry.append(...inner.childNodes);
    node.append(entry);
  }
  return node;
}

function table(lines) {
  const row = (line, cell) =>
    element('tr', {}, ...line.trim().slice(1, -1).split('|').map((text) => element(cell, {}, ...inline(text.trim()))));
  const body = lines.slice(2).map((line) => row(line, 'td'));
  const node = element('table', {}, element('thead', {}, row(lines[0], 'th')), element('tbody', {}, ...body));
  return element('div', { className: 'wide-table', tabIndex: 0 }, node);
}

const INLINE = new RegExp([
  /\\([\\`*_{}[\]()#+.!|~>-])/, // 1: escaped
  /(`+)(.+?)\2(?!`)/, // 3: code
  /\*\*(?=\S)((?:`[^`]*`|[^`])+?)(?<=\S)\*\*(?!\*)/, // 4: bold
  /(?<!\*)\*(?=[^\s*])([^*]+?)(?<=\S)\*(?!\*)/, // 5: emphasis
  /(?<!\w)_(?=\S)([^_]+?)(?<=\S)_(?!\w)/, // 6: emphasis
  /!?\[([^\]]{1,500})\]\(<?([^\s)>]{1,2000})>?(?:\s+"[^"]{0,500}")?\)/, // 7, 8: link
  /(https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}*_])/, // 9: bare link
].map((part) => part.source).join('|'), 'gs');

/** Nodes of text within a block. */
function inline(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, escaped, , code, bold, star, line, label, target, bare] = match;
    nodes.push(text.slice(at, match.index));
    at = match.index + whole.length;
    if (escaped) nodes.push(escaped);
    else if (code !== undefined) nodes.push(element('code', {}, code.trim() || code));
    else if (bold) nodes.push(element('strong', {}, ...inline(bold)));
    else if (star ?? line) nodes.push(element('em', {}, ...inline(star ?? line)));
    else nodes.push(link(target ?? bare, label ? inline(label) : [bare], whole));
  }
  nodes.push(text.slice(at));
  return nodes.filter((node) => node !== '');
}

/** A link to the web or to mail; every other target stays the text that it was. */
function link(target, label, whole) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return whole;
  return element('a', { href: target, target: '_blank', rel: 'noopener noreferrer' }, ...label);
}
