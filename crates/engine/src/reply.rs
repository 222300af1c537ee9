//! What a model's output says: reasoning, content and tool calls, told apart while the text streams.
//!
//! ```text
//! reasoning</think>
//!
//! content
//!
//! <tool_call>
//! <function=NAME>
//! <parameter=KEY>
//! value, which may have several lines
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! # Rules
//!
//! The result never depends on how the text was cut. Text comes out at once unless it may belong to a tag, or is white
//! space that a tag may follow.
//!
//! **Thinking.** There is one think block: the one that the prompt left open, or that the output begins with. Think tags
//! elsewhere are text. White space at both ends of the reasoning and line breaks between `</think>` and the content
//! belong to neither.
//!
//! **Calls.** `<tool_call>`, a function's opening tag, and then a parameter or a closing tag make a call, with white
//! space or none between them; anything else is text, as are all calls where no tools were offered. The function need
//! not be an offered one. `<tool_call>` may be missing outside thinking where an offered function's tag starts a line.
//! A call inside an open think block is a call, and the block goes on behind it. Closing tags of calls right behind a
//! call belong to it. White space next to calls is content (or reasoning) only between other text.
//!
//! **Values.** One line break behind the opening tag and one before the closing tag are not part of a value; all else
//! is. A value may hold tags: `</parameter>` ends it where another parameter, a closing tag of function or call, another
//! call or the end of the output follows, white space aside; and where a line break is before or behind it, unless the
//! value began in the line of its opening tag. Where `</parameter>` is missing, closing tags of function and call on
//! their own line end the value if the output, or another call, comes right behind them. A missing `</function>` is
//! forgiven.
//!
//! **JSON.** Arguments keep the order of the output; a key that comes twice is there twice. A value is a string where
//! the schema of its parameter allows a string or says no type, except for `null` where null is allowed. Elsewhere it is
//! read as JSON (or Python's `True`, `False` and `None`), and is a string only if it is none. A schema says its types by
//! the first of `$ref`, `type`, `const`, `enum`, `anyOf` with `oneOf` and `allOf`, `properties`, `items` that names any;
//! `nullable` adds null.
//!
//! **Cut output.** What was held back is text. A value and its call end with the output, and a tag of the call that was
//! cut is dropped: the arguments are JSON, and [`ReplyEvent::CallEnded`] says that the call is not complete.

mod arguments;
mod tags;
#[cfg(test)]
mod tests;

use std::ops::ControlFlow::{self, Break, Continue};

use serde_json::Value;

pub(crate) use arguments::value_is_text;
use arguments::{Tools, Writer};
use tags::{Ahead, Miss, Next, first};

const THINK_OPEN: &str = "<think>";
const THINK_CLOSE: &str = "</think>";

/// A part of the output, as soon as it is certain. No text in it is empty. Between begin and end of a call come only its
/// arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyEvent {
    /// Text of the think block.
    Reasoning(String),
    /// Text of the answer.
    Content(String),
    /// A call begins.
    CallBegun {
        /// Counts the calls of the output, from 0.
        index: usize,
        /// Name of the function.
        name: String,
    },
    /// A piece of the JSON of the call's arguments. All pieces of a call together are one JSON object.
    Arguments {
        /// Which call.
        index: usize,
        /// The piece; whole characters and whole escapes.
        json: String,
    },
    /// A call is over. A reader that wants no more calls can stop here.
    CallEnded {
        /// Which call.
        index: usize,
        /// Whether the function or the call has a closing tag. Without, the output may have been cut.
        complete: bool,
    },
}

/// Where an output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyEnd {
    /// In a think block.
    Reasoning,
    /// In the content, or behind a call.
    Content,
    /// In a call, which is not complete.
    Call,
}

/// A call that the model made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the function.
    pub name: String,
    /// Its arguments: the JSON of an object.
    pub arguments: String,
    /// See [`ReplyEvent::CallEnded`].
    pub complete: bool,
}

/// A whole output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// Text of the think block.
    pub reasoning: String,
    /// Text of the answer.
    pub content: String,
    /// The calls, in the order of the output.
    pub calls: Vec<ToolCall>,
}

impl Extend<ReplyEvent> for Reply {
    fn extend<T: IntoIterator<Item = ReplyEvent>>(&mut self, events: T) {
        for event in events {
            match event {
                ReplyEvent::Reasoning(text) => self.reasoning.push_str(&text),
                ReplyEvent::Content(text) => self.content.push_str(&text),
                ReplyEvent::CallBegun { name, .. } => self.calls.push(ToolCall { name, ..ToolCall::default() }),
                ReplyEvent::Arguments { json, .. } => {
                    self.calls.last_mut().into_iter().for_each(|call| call.arguments.push_str(&json));
                }
                ReplyEvent::CallEnded { complete, .. } => {
                    self.calls.last_mut().into_iter().for_each(|call| call.complete = complete);
                }
            }
        }
    }
}

/// Parses streamed output by the rules of this module: reasoning, content and calls, the same for every way the text is
/// cut.
///
/// ```
/// use lily_engine::{ReplyEvent, ReplyParser};
///
/// let tools = serde_json::json!([{"type": "function", "function": {"name": "now"}}]);
/// let mut parser = ReplyParser::new(true, &tools);
/// assert_eq!(parser.push("Noon?\n</th"), [ReplyEvent::Reasoning("Noon?".into())]);
/// assert_eq!(parser.push("ink>\n\n<tool_call>\n<function=now>\n"), []);
/// let call = [
///     ReplyEvent::CallBegun { index: 0, name: "now".into() },
///     ReplyEvent::Arguments { index: 0, json: "{}".into() },
///     ReplyEvent::CallEnded { index: 0, complete: true },
/// ];
/// assert_eq!(parser.push("</function>\n</tool_call>"), call);
/// ```
#[derive(Clone, Debug)]
pub struct ReplyParser {
    tools: Tools,
    place: Place,
    in_reasoning: bool,
    /// Text that is not read yet.
    held: String,
    over: bool,
    /// White space before more text, which is text if more comes.
    gap: String,
    /// A call was at the gap.
    gap_at_call: bool,
    /// Text was before the gap.
    spoken: bool,
    /// The read text ends with a line break, or there is none.
    starts_line: bool,
    calls: usize,
    /// The output ended in a call.
    cut_in_call: bool,
    events: Vec<ReplyEvent>,
}

#[derive(Clone, Debug)]
enum Place {
    /// No text yet that tells whether a think block opens.
    Start,
    /// In reasoning or content.
    Text,
    /// Behind a think block, before the first text.
    ThinkClosed,
    /// In a call, between its parameters.
    Call(Call),
    /// In a call, at the start of a value.
    ValueOpened(Call),
    /// In a value. `in_line`: it began in the line of its opening tag.
    Value { call: Call, in_line: bool },
    /// Behind a call, where closing tags may still follow.
    CallClosed,
}

#[derive(Clone, Debug)]
struct Call {
    name: String,
    writer: Writer,
}

/// What a tag in text does.
enum Tag {
    CloseThink,
    OpenCall(String),
}

/// A step through the text: how many bytes it read, and whether another step can follow (`Continue`) or more text must
/// come first (`Break`).
type Step = ControlFlow<usize, usize>;

impl ReplyParser {
    /// `in_thinking`: the prompt ends inside an open think block. `tools`: the list that was offered, in the format of
    /// OpenAI's API, or null where a call would be text.
    pub fn new(in_thinking: bool, tools: &Value) -> ReplyParser {
        ReplyParser {
            tools: Tools::new(tools),
            place: if in_thinking { Place::Text } else { Place::Start },
            in_reasoning: in_thinking,
            held: String::new(),
            over: false,
            gap: String::new(),
            gap_at_call: false,
            spoken: false,
            starts_line: true,
            calls: 0,
            cut_in_call: false,
            events: Vec::new(),
        }
    }

    /// Parses an output that is whole.
    pub fn parse(in_thinking: bool, tools: &Value, output: &str) -> Reply {
        let mut parser = ReplyParser::new(in_thinking, tools);
        let mut reply = Reply::default();
        reply.extend(parser.push(output));
        reply.extend(parser.finish().0);
        reply
    }

    /// Whether the text so far ends inside a think block.
    pub fn in_reasoning(&self) -> bool {
        self.in_reasoning
    }

    /// Calls that have begun.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Takes the next piece of text and gives what is certain.
    pub fn push(&mut self, text: &str) -> Vec<ReplyEvent> {
        self.held.push_str(text);
        self.read();
        std::mem::take(&mut self.events)
    }

    /// The text is over: gives what was held back, and where the output ended.
    pub fn finish(&mut self) -> (Vec<ReplyEvent>, ReplyEnd) {
        self.over = true;
        self.read();
        if !self.in_reasoning && !self.gap_at_call {
            self.flush_gap();
        }
        let end = match (self.cut_in_call, self.in_reasoning) {
            (true, _) => ReplyEnd::Call,
            (false, true) => ReplyEnd::Reasoning,
            (false, false) => ReplyEnd::Content,
        };
        (std::mem::take(&mut self.events), end)
    }

    fn read(&mut self) {
        let text = std::mem::take(&mut self.held);
        let mut at = 0;
        loop {
            let ahead = Ahead { text: &text[at..], over: self.over };
            match self.step(ahead) {
                Continue(bytes) => at += bytes,
                Break(bytes) => {
                    self.held = text[at + bytes..].to_owned();
                    return;
                }
            }
        }
    }

    fn step(&mut self, ahead: Ahead<'_>) -> Step {
        match std::mem::replace(&mut self.place, Place::Text) {
            Place::Start => self.read_start(ahead),
            Place::Text => self.read_text(ahead),
            Place::ThinkClosed => self.read_line_breaks(ahead),
            Place::Call(call) => self.read_call(ahead, call),
            Place::ValueOpened(call) => self.open_value(ahead, call),
            Place::Value { call, in_line } => self.read_value(ahead, call, in_line),
            Place::CallClosed => self.read_behind_call(ahead),
        }
    }

    /// Waits for more text at `place`.
    fn wait(&mut self, place: Place, read: usize) -> Step {
        self.place = place;
        Break(read)
    }

    fn read_start(&mut self, ahead: Ahead<'_>) -> Step {
        let begun = Ahead { text: ahead.text.trim_start_matches('\n'), ..ahead };
        match begun.tag(THINK_OPEN) {
            Ok(behind) => {
                self.in_reasoning = true;
                Continue(ahead.text.len() - behind.text.len())
            }
            Err(Miss::Later) => self.wait(Place::Start, 0),
            Err(Miss::Never) => Continue(0),
        }
    }

    fn read_text(&mut self, ahead: Ahead<'_>) -> Step {
        let text = ahead.text;
        for (at, _) in text.match_indices('<') {
            let starts_line = if at == 0 { self.starts_line } else { text[..at].ends_with('\n') };
            match self.tag(Ahead { text: &text[at..], ..ahead }, starts_line) {
                Ok((tag, behind)) => {
                    self.say(&text[..at]);
                    match tag {
                        Tag::CloseThink => self.close_think(),
                        Tag::OpenCall(name) => self.open_call(name),
                    }
                    return Continue(text.len() - behind.text.len());
                }
                Err(Miss::Later) => {
                    self.say(&text[..at]);
                    return Break(at);
                }
                Err(Miss::Never) => (),
            }
        }
        self.say(text);
        Break(text.len())
    }

    /// The tag that stands there, if it means something in this text.
    fn tag<'a>(&self, at: Ahead<'a>, starts_line: bool) -> Result<(Tag, Ahead<'a>), Miss> {
        let think = if self.in_reasoning { at.tag(THINK_CLOSE) } else { Err(Miss::Never) };
        let call = if self.tools.is_empty() {
            Err(Miss::Never)
        } else {
            let may_be_bare = starts_line && !self.in_reasoning;
            at.call(may_be_bare.then_some(|name: &str| self.tools.offers(name)))
        };
        first([
            think.map(|behind| (Tag::CloseThink, behind)),
            call.map(|(name, behind)| (Tag::OpenCall(name.to_owned()), behind)),
        ])
    }

    fn close_think(&mut self) {
        self.in_reasoning = false;
        self.gap.clear();
        self.gap_at_call = false;
        self.spoken = false;
        self.starts_line = true;
        self.place = Place::ThinkClosed;
    }

    fn read_line_breaks(&mut self, ahead: Ahead<'_>) -> Step {
        let read = ahead.text.len() - ahead.text.trim_start_matches('\n').len();
        if read == ahead.text.len() { self.wait(Place::ThinkClosed, read) } else { Continue(read) }
    }

    fn open_call(&mut self, name: String) {
        self.gap_at_call = true;
        self.emit(ReplyEvent::CallBegun { index: self.calls, name: name.clone() });
        self.calls += 1;
        self.place = Place::Call(Call { name, writer: Writer::default() });
    }

    fn read_call(&mut self, ahead: Ahead<'_>, mut call: Call) -> Step {
        // What may not follow here was not taken for a call, or left in the value before.
        let (next, behind) = match ahead.next() {
            Ok(found) => found,
            Err(Miss::Later) => return self.wait(Place::Call(call), 0),
            Err(Miss::Never) => (Next::CallOpened, ahead),
        };
        let read = ahead.text.len() - behind.text.len();
        match next {
            Next::Parameter(key) => {
                let json = call.writer.begin(&self.tools, &call.name, key);
                self.argue(json);
                self.place = Place::ValueOpened(call);
                Continue(read)
            }
            Next::FunctionClosed | Next::CallClosed => {
                self.close_call(call, true);
                Continue(read)
            }
            Next::CallOpened => {
                self.close_call(call, false);
                Continue(0)
            }
            Next::Over => {
                self.cut_in_call = true;
                self.close_call(call, false);
                Continue(read)
            }
        }
    }

    fn close_call(&mut self, call: Call, complete: bool) {
        self.argue(call.writer.finish().to_owned());
        self.emit(ReplyEvent::CallEnded { index: self.calls - 1, complete });
        self.place = Place::CallClosed;
    }

    fn read_behind_call(&mut self, ahead: Ahead<'_>) -> Step {
        self.starts_line = true;
        match ahead.closed_again() {
            Ok(behind) if behind.text.is_empty() && ahead.over => Continue(ahead.text.len()),
            Ok(behind) => {
                self.place = Place::CallClosed;
                Continue(ahead.text.len() - behind.text.len())
            }
            Err(Miss::Later) => self.wait(Place::CallClosed, 0),
            Err(Miss::Never) => Continue(0),
        }
    }

    fn open_value(&mut self, ahead: Ahead<'_>, call: Call) -> Step {
        if ahead.text.is_empty() && !ahead.over {
            return self.wait(Place::ValueOpened(call), 0);
        }
        let in_line = !ahead.text.starts_with('\n');
        self.starts_line = !in_line;
        self.place = Place::Value { call, in_line };
        Continue(usize::from(!in_line))
    }

    fn read_value(&mut self, ahead: Ahead<'_>, mut call: Call, in_line: bool) -> Step {
        let text = ahead.text;
        for (at, _) in text.match_indices('<') {
            let break_before = text[..at].ends_with('\n');
            let starts_line = break_before || (at == 0 && self.starts_line);
            let before = &text[..at - usize::from(break_before)];
            match (Ahead { text: &text[at..], ..ahead }).value_end(starts_line, in_line) {
                Ok(behind) => {
                    self.argue(call.writer.push(before) + &call.writer.end());
                    self.place = Place::Call(call);
                    return Continue(text.len() - behind.text.len());
                }
                Err(Miss::Later) => {
                    self.argue(call.writer.push(before));
                    self.starts_line &= before.is_empty();
                    return self.wait(Place::Value { call, in_line }, before.len());
                }
                Err(Miss::Never) => (),
            }
        }
        if ahead.over {
            self.argue(call.writer.push(text) + &call.writer.end());
            self.place = Place::Call(call);
            return Continue(text.len());
        }
        let before = text.strip_suffix('\n').unwrap_or(text);
        self.argue(call.writer.push(before));
        self.starts_line &= before.is_empty();
        self.wait(Place::Value { call, in_line }, before.len())
    }

    /// Gives text out, but for the white space at its end.
    fn say(&mut self, text: &str) {
        let words = text.trim();
        if words.is_empty() {
            self.gap.push_str(text);
        } else {
            let end = text.trim_end().len();
            let start = end - words.len();
            self.gap.push_str(&text[..start]);
            if !self.spoken && (self.in_reasoning || self.gap_at_call) {
                self.gap.clear();
            }
            self.gap.push_str(words);
            self.flush_gap();
            self.gap_at_call = false;
            self.spoken = true;
            self.gap.push_str(&text[end..]);
        }
        if !text.is_empty() {
            self.starts_line = text.ends_with('\n');
        }
        // Then nothing can follow that takes the white space away.
        if self.tools.is_empty() && !self.in_reasoning {
            self.flush_gap();
        }
    }

    fn flush_gap(&mut self) {
        let text = std::mem::take(&mut self.gap);
        if !text.is_empty() {
            self.emit(if self.in_reasoning { ReplyEvent::Reasoning(text) } else { ReplyEvent::Content(text) });
        }
    }

    fn argue(&mut self, json: String) {
        if !json.is_empty() {
            self.emit(ReplyEvent::Arguments { index: self.calls - 1, json });
        }
    }

    /// Adds an event, or its text to that of the event before.
    fn emit(&mut self, event: ReplyEvent) {
        use ReplyEvent::{Arguments, Content, Reasoning};
        match (self.events.last_mut(), event) {
            (Some(Reasoning(before)), Reasoning(text)) | (Some(Content(before)), Content(text)) => {
                before.push_str(&text)
            }
            (Some(Arguments { json: before, .. }), Arguments { json, .. }) => before.push_str(&json),
            (_, event) => self.events.push(event),
        }
    }
}
