//! `lily chat`: a conversation in the terminal.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use etcetera::BaseStrategy;
use lily_engine::{FinishReason, Finished};
use lily_model::chat::Chat;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};

use crate::args::{ModelArgs, SamplingArgs};
use crate::exit::Usage;
use crate::talk::Talk;

/// Arguments of `lily chat`.
#[derive(Args)]
pub struct ChatArgs {
    /// A system message at the start.
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Answer at once, without thinking first (`/think` changes it).
    #[arg(long)]
    no_think: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

const HELP: &str = "\
/new            forget the conversation
/retry          answer the last question again
/undo           take the last question and its answer back
/system TEXT    set the system message and start anew; without TEXT, show it
/think on|off   think before answering, or not
/save FILE      write the conversation as JSON
/load FILE      continue a conversation saved before
/stats          counts of the last answer
/help           this list
/exit           leave (also Ctrl-D)
A line that ends in \\ goes on in the next. Ctrl-C stops the answer.";

/// Runs the command.
pub fn chat(args: ChatArgs) -> anyhow::Result<()> {
    let talk = Talk::open(&args.model)?;
    let mut conversation = Conversation {
        talk,
        sampling: args.sampling,
        system: args.system,
        thinking: !args.no_think,
        messages: Vec::new(),
        last: None,
    };
    let mut editor = DefaultEditor::new().context("cannot use this terminal")?;
    let history = history_file();
    if let Some(file) = &history {
        // A first start has no history yet.
        let _ = editor.load_history(file);
    }
    eprintln!("/help lists the commands, Ctrl-D leaves.");
    while let Some(line) = read_message(&mut editor)? {
        if line.trim().is_empty() {
            continue;
        }
        editor.add_history_entry(&line)?;
        let outcome = match line.trim().strip_prefix('/') {
            Some(command) => conversation.command(command),
            None => conversation.ask(line).map(|()| true),
        };
        match outcome {
            Ok(true) => {}
            Ok(false) => break,
            // A refused request or command does not end the conversation.
            Err(error) => eprintln!("lily: {error:#}"),
        }
    }
    if let Some(file) = history
        && let Err(error) = save_history(&mut editor, &file)
    {
        eprintln!("lily: cannot keep the history in {}: {error:#}", file.display());
    }
    Ok(())
}

fn history_file() -> Option<PathBuf> {
    let base = etcetera::base_strategy::choose_native_strategy().ok()?;
    Some(base.data_dir().join("lily").join("history"))
}

fn save_history(editor: &mut DefaultEditor, file: &PathBuf) -> anyhow::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    Ok(editor.save_history(file)?)
}

/// One message, of several lines where they end in a backslash; `None` at the end of input.
fn read_message(editor: &mut DefaultEditor) -> anyhow::Result<Option<String>> {
    let mut message = String::new();
    loop {
        match editor.readline(if message.is_empty() { "> " } else { ". " }) {
            Ok(line) => match line.strip_suffix('\\') {
                Some(start) => {
                    message.push_str(start);
                    message.push('\n');
                }
                None => {
                    message.push_str(&line);
                    return Ok(Some(message));
                }
            },
            Err(ReadlineError::Interrupted) => {
                message.clear();
                eprintln!("(Ctrl-D leaves)");
            }
            Err(ReadlineError::Eof) => return Ok(None),
            Err(error) => return Err(error).context("cannot read from the terminal"),
        }
    }
}

struct Conversation {
    talk: Talk,
    sampling: SamplingArgs,
    system: Option<String>,
    thinking: bool,
    /// Questions and answers in turn, as the chat template takes them.
    messages: Vec<Value>,
    last: Option<Finished>,
}

impl Conversation {
    /// Adds the question, streams the answer and adds it. If that fails the question is taken back.
    fn ask(&mut self, question: String) -> anyhow::Result<()> {
        let before = self.messages.len();
        self.messages.push(json!({"role": "user", "content": question}));
        let result = self.answer();
        if result.is_err() {
            self.messages.truncate(before);
        }
        result
    }

    fn answer(&mut self) -> anyhow::Result<()> {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let chat = Chat {
            messages: system.chain(self.messages.iter().cloned()).collect(),
            enable_thinking: (!self.thinking).then_some(false),
            add_generation_prompt: true,
            ..Chat::default()
        };
        let model = &self.talk.text;
        let prompt = model.prompt(&model.template.render_chat(&chat)?)?;
        let answer = self.talk.answer(&prompt, &self.sampling, &Value::Null)?;
        if answer.finished.reason == FinishReason::ContextFull {
            eprintln!("lily: the context is full; /new starts over, --ctx sets its size");
        }
        self.messages.push(json!({
            "role": "assistant",
            "reasoning_content": answer.reply.reasoning,
            "content": answer.reply.content,
        }));
        self.last = Some(answer.finished);
        Ok(())
    }

    /// Runs a command; `false` ends the conversation.
    fn command(&mut self, command: &str) -> anyhow::Result<bool> {
        let (name, argument) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let argument = argument.trim();
        match name {
            "exit" | "quit" => return Ok(false),
            "help" => eprintln!("{HELP}"),
            "new" => self.messages.clear(),
            "undo" => {
                self.take_back()?;
            }
            "retry" => {
                let question = self.take_back()?;
                self.ask(question)?;
            }
            "system" if argument.is_empty() => match &self.system {
                Some(text) => eprintln!("{text}"),
                None => eprintln!("(no system message)"),
            },
            "system" => {
                self.system = Some(argument.to_owned());
                self.messages.clear();
            }
            "think" => {
                self.thinking = match argument {
                    "on" => true,
                    "off" => false,
                    _ => return Err(Usage(format!("/think {argument}: expected on or off")).into()),
                }
            }
            "save" => self.save(argument)?,
            "load" => self.load(argument)?,
            "stats" => match &self.last {
                Some(end) => eprintln!("{}", self.talk.stats(end)),
                None => eprintln!("(no answer yet)"),
            },
            _ => return Err(Usage(format!("unknown command /{name}; /help lists the commands")).into()),
        }
        Ok(true)
    }

    /// Removes the last question and what followed it; returns the question.
    fn take_back(&mut self) -> anyhow::Result<String> {
        let last = self.messages.iter().rposition(|m| m["role"] == "user");
        let at = last.ok_or_else(|| Usage("there is no question yet".into()))?;
        let question = self.messages[at]["content"].as_str().unwrap_or_default().to_owned();
        self.messages.truncate(at);
        Ok(question)
    }

    fn save(&self, file: &str) -> anyhow::Result<()> {
        if file.is_empty() {
            return Err(Usage("/save needs a file name".into()).into());
        }
        let conversation = json!({"system": self.system, "messages": self.messages});
        let json = serde_json::to_vec_pretty(&conversation)?;
        std::fs::write(file, json).with_context(|| format!("cannot write {file}"))
    }

    fn load(&mut self, file: &str) -> anyhow::Result<()> {
        if file.is_empty() {
            return Err(Usage("/load needs a file name".into()).into());
        }
        #[derive(serde::Deserialize)]
        struct Saved {
            system: Option<String>,
            messages: Vec<Value>,
        }
        let json = std::fs::read(file).with_context(|| format!("cannot read {file}"))?;
        let saved: Saved = serde_json::from_slice(&json)
            .map_err(|e| Usage(format!("{file} is not a conversation written by /save: {e}")))?;
        (self.system, self.messages) = (saved.system, saved.messages);
        Ok(())
    }
}
