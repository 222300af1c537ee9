//! Chat messages to prompt text, by the checkpoint's own template.
//!
//! [`ChatTemplate::render`] is the template as transformers would run it, on messages as they are.
//! [`ChatTemplate::render_chat`] is what an engine wants: it takes the messages that clients really send
//! (see [`normalize_messages`]) and never fails on their order or shape without saying which one and why.
//!
//! # Where text comes from
//!
//! A message can hold the text `<|im_end|>`. In the prompt this must stay text: only the template may end a turn.
//! So a [`Rendered`] prompt knows which of its bytes are *data*, and
//! [`Tokenizer::encode_rendered`](crate::tokenizer::Tokenizer::encode_rendered) makes control tokens only from
//! bytes that the template itself wrote. Data is
//!
//! - every string in the messages, tools and template variables, and what the template cuts out of it: split at
//!   `</think>`, the pieces are data and the removed tag is gone; a think tag that the template writes around them
//!   is the template's;
//! - all that the `tojson` filter writes;
//! - names of object members, unless they are made of ASCII letters, digits, `_`, `-` and `.` only. Templates look
//!   members up by such names, so these count as the template's words; likewise the values of `role` and `type`,
//!   and whole variables (`reasoning_effort: "high"`), when they look like that.
//!
//! It is found by rendering twice: once plainly, which gives the text, and once with all data between two private
//! characters. The filters and methods that look into strings are taught to see through these. Both renderings
//! must give the same text; a template that does something with message text that cannot be followed is refused
//! ([`ChatError::Untraceable`]) rather than trusted.

mod mark;
mod normalize;
mod python;
mod template;

use std::ops::Range;

use serde_json::{Map, Value};

pub use normalize::{normalize_messages, normalize_tools};

/// Why a conversation could not be rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    /// The template is not valid Jinja.
    #[error("chat template, line {line}: {problem}")]
    Syntax {
        /// Line in the template, from 1; 0 if not known.
        line: usize,
        /// What is wrong there.
        problem: String,
    },
    /// A file that should hold the template does not.
    #[error("{file}: {problem}")]
    File {
        /// Name of the file.
        file: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The template called `raise_exception` with this message.
    #[error("the chat template refuses these messages: {0}")]
    Raised(String),
    /// The template failed on these messages.
    #[error("the chat template failed: {0}")]
    Render(String),
    /// The template did far more work than this input needs.
    #[error("the chat template was stopped: it does not come to an end in reasonable time")]
    TooMuchWork,
    /// The template treats message text in a way that hides where the text came from.
    #[error(
        "the chat template rewrites message text in a way that cannot be followed, so text of a message could \
         pass as a control token; use the checkpoint's original chat_template.jinja"
    )]
    Untraceable,
    /// Nothing to answer.
    #[error("messages: found none, expected at least one")]
    NoMessages,
    /// A part of the request has the wrong shape.
    #[error("{field}: found {found}, expected {expected}")]
    Input {
        /// Path of the part, such as `messages[2].content[0].type`.
        field: String,
        /// What is there.
        found: String,
        /// What should be there, or what to do about it.
        expected: &'static str,
    },
}

/// A conversation as a client sends it, in the words of the chat completions format.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Chat {
    /// Array of messages; see [`normalize_messages`].
    pub messages: Value,
    /// Array of tools, or null; see [`normalize_tools`].
    pub tools: Value,
    /// Whether the model is to think first. `None`: as the template decides.
    pub enable_thinking: Option<bool>,
    /// Whether the reasoning of all earlier turns stays in the prompt. `None`: as the template decides.
    ///
    /// With it, a turn answered with thinking switched off keeps its empty think block, so that the next prompt
    /// begins with exactly this one.
    pub preserve_thinking: Option<bool>,
    /// Whether the prompt ends with the header of the assistant's next turn.
    pub add_generation_prompt: bool,
    /// Further variables for the template. The fields above win over variables of the same name.
    pub variables: Map<String, Value>,
}

/// A prompt and the origin of its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    text: String,
    data: Vec<Range<usize>>,
}

impl Rendered {
    /// A prompt that someone wrote by hand, control tokens included: all of it counts as the template's.
    pub fn by_hand(text: impl Into<String>) -> Rendered {
        Rendered { text: text.into(), data: Vec::new() }
    }

    /// The whole prompt.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The byte ranges of [`text`](Self::text) that are data: ascending, not empty, not touching each other.
    pub fn data(&self) -> &[Range<usize>] {
        &self.data
    }

    /// The byte ranges that the template wrote, in order: all the others.
    pub fn written_by_template(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let starts = std::iter::once(0).chain(self.data.iter().map(|data| data.end));
        let ends = self.data.iter().map(|data| data.start).chain(std::iter::once(self.text.len()));
        starts.zip(ends).map(|(start, end)| start..end).filter(|range| !range.is_empty())
    }

    /// Where the template wrote `word`.
    fn find<'a>(&'a self, word: &'a str) -> impl Iterator<Item = usize> + 'a {
        self.written_by_template()
            .flat_map(move |range| self.text[range.clone()].match_indices(word).map(move |(at, _)| range.start + at))
    }

    /// Whether the model goes on inside a think block: the template opened one after the last turn began, and
    /// closed none since.
    pub fn ends_in_thinking(&self) -> bool {
        let turn = self.find("<|im_start|>").last();
        let opened = self.find("<think>").last().filter(|&at| turn.is_none_or(|turn| at > turn));
        opened.is_some_and(|opened| self.find("</think>").last().is_none_or(|closed| closed < opened))
    }

    /// Where the headers of all turns start, the assistant's among them.
    pub fn turn_starts(&self) -> Vec<usize> {
        self.find("<|im_start|>").collect()
    }

    /// Where the headers of assistant turns start: the offsets of their `<|im_start|>`.
    ///
    /// Before each of these the prompts of two requests with the same history agree, whatever happens to the
    /// reasoning or the think block of the turn itself.
    pub fn assistant_starts(&self) -> Vec<usize> {
        self.find("<|im_start|>assistant").collect()
    }
}

/// A chat template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    source: String,
    constants: Vec<(String, String)>,
}

impl ChatTemplate {
    /// Takes the source of a template.
    ///
    /// # Errors
    /// [`ChatError::Syntax`].
    pub fn new(source: &str) -> Result<ChatTemplate, ChatError> {
        template::compile(source)?;
        Ok(ChatTemplate { source: source.to_owned(), constants: Vec::new() })
    }

    /// Takes the template of a checkpoint: the bytes of its `chat_template.jinja`, or else the `chat_template` of
    /// its `tokenizer_config.json`. The template sees that file's `bos_token`, `eos_token` and `pad_token`.
    ///
    /// # Errors
    /// [`ChatError::Syntax`], or [`ChatError::File`] if neither file holds a template.
    pub fn from_checkpoint(jinja: Option<&[u8]>, tokenizer_config: Option<&[u8]>) -> Result<ChatTemplate, ChatError> {
        let bad = |file, problem: String| ChatError::File { file, problem };
        let config: Value = match tokenizer_config {
            Some(bytes) => {
                serde_json::from_slice(bytes).map_err(|error| bad("tokenizer_config.json", error.to_string()))?
            }
            None => Value::Null,
        };
        let source = match jinja {
            Some(bytes) => std::str::from_utf8(bytes).map_err(|error| bad("chat_template.jinja", error.to_string()))?,
            None => config["chat_template"].as_str().ok_or_else(|| {
                bad("chat_template.jinja", "missing, and tokenizer_config.json has no chat_template either".to_owned())
            })?,
        };
        let mut template = ChatTemplate::new(source)?;
        for name in ["bos_token", "eos_token", "pad_token"] {
            let token = &config[name];
            if let Some(text) = token.as_str().or_else(|| token["content"].as_str()) {
                template.constants.push((name.to_owned(), text.to_owned()));
            }
        }
        Ok(template)
    }

    /// Runs the template as transformers does: `messages`, `tools` and `variables` reach it as they are.
    ///
    /// # Errors
    /// [`ChatError::Input`] for tools that are a text, [`ChatError::Raised`] if the template raises,
    /// [`ChatError::Render`] if it fails, [`ChatError::TooMuchWork`] or [`ChatError::Untraceable`] if it is no template
    /// for this purpose.
    pub fn render(
        &self,
        messages: &Value,
        tools: &Value,
        variables: &Map<String, Value>,
    ) -> Result<Rendered, ChatError> {
        // A template would go through it character by character. transformers refuses it as well.
        if tools.is_string() {
            normalize_tools(tools)?;
        }
        let input = self.input(messages, tools, variables);
        let marks = input.taken(&self.source).free_marks().ok_or(ChatError::Untraceable)?;
        let traced = template::render(&self.source, &input, marks)?;
        Ok(Rendered { text: traced.text, data: traced.data })
    }

    /// Renders a conversation as clients send it.
    ///
    /// Messages are first brought into the template's shape by [`normalize_messages`]. A conversation without a
    /// user's question, which the template refuses, is rendered as if everything in it came after the question.
    ///
    /// # Errors
    /// [`ChatError::Input`] and [`ChatError::NoMessages`] for the client to mend; else as [`Self::render`].
    pub fn render_chat(&self, chat: &Chat) -> Result<Rendered, ChatError> {
        let messages = normalize_messages(&chat.messages)?;
        let has_question = messages.iter().any(normalize::is_question);
        let after_system = usize::from(messages[0]["role"] == "system");
        let mut messages = Value::Array(messages);
        let tools = normalize_tools(&chat.tools)?;
        let mut variables = chat.variables.clone();
        for name in ["messages", "tools"] {
            variables.remove(name);
        }
        variables.insert("add_generation_prompt".to_owned(), chat.add_generation_prompt.into());
        let switches = [("enable_thinking", chat.enable_thinking), ("preserve_thinking", chat.preserve_thinking)];
        for (name, switch) in switches {
            if let Some(on) = switch {
                variables.insert(name.to_owned(), on.into());
            }
        }

        let taken = self.input(&messages, &tools, &variables).taken(&self.source);
        let marks = taken.free_marks().ok_or(ChatError::Untraceable)?;
        if let (false, Value::Array(messages)) = (has_question, &mut messages) {
            let question = serde_json::json!({ "role": "user", "content": marks.placeholder.to_string() });
            messages.insert(after_system, question);
        }
        let mut traced = template::render(&self.source, &self.input(&messages, &tools, &variables), marks)?;
        if !has_question {
            cut_placeholder(&mut traced, marks);
        }
        Ok(Rendered { text: traced.text, data: traced.data })
    }

    fn input<'a>(
        &'a self,
        messages: &'a Value,
        tools: &'a Value,
        variables: &'a Map<String, Value>,
    ) -> template::Input<'a> {
        let variables = variables.iter().map(|(name, value)| (name.as_str(), value));
        template::Input {
            variables: variables.chain([("messages", messages), ("tools", tools)]).collect(),
            constants: &self.constants,
        }
    }
}

/// Takes the turn of the placeholder message out, or at least the placeholder from a template of other form.
fn cut_placeholder(traced: &mut mark::Traced, marks: mark::Marks) {
    const BEFORE: &str = "<|im_start|>user\n";
    const AFTER: &str = "<|im_end|>\n";
    while let Some(at) = traced.text.find(marks.placeholder) {
        let end = at + marks.placeholder.len_utf8();
        let in_turn = traced.text[..at].ends_with(BEFORE) && traced.text[end..].starts_with(AFTER);
        let turn = if in_turn { at - BEFORE.len()..end + AFTER.len() } else { at..end };
        traced.remove(turn);
    }
}
