//! `lily eval tasks`: answers to prompts whose right answers are known.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use clap::Args;
use lily_engine::Reply;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::ask::{Answer, Asker};
use super::record::Results;
use super::{Common, name};
use crate::checkpoint;
use crate::exit::Usage;
use crate::output::progress;

/// Arguments of `lily eval tasks`.
#[derive(Args)]
pub struct TasksArgs {
    /// Prompts, one JSON object a line, like tools/train-demo/heldout/tasks.jsonl: `task` (its name in the table), `messages`, `tools`
    /// or null, `thinking`, and what is expected.
    file: PathBuf,
    /// Only the first prompts of each task.
    #[arg(long, value_name = "N")]
    each: Option<NonZeroUsize>,
    /// Most tokens of an answer. One that needs more counts as wrong.
    #[arg(short = 'n', long, value_name = "N", default_value = "420")]
    max_tokens: NonZeroUsize,
    /// Write every answer to this file, a JSON object a line.
    #[arg(long, value_name = "FILE")]
    answers: Option<PathBuf>,
    #[command(flatten)]
    common: Common,
}

/// One line of the file.
#[derive(Deserialize)]
struct Row {
    task: String,
    messages: Value,
    #[serde(default)]
    tools: Value,
    thinking: bool,
    expect: Expected,
}

/// What a right answer is.
#[derive(Debug, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Expected {
    /// Its last whole number is this.
    Number { number: String },
    /// One call, and nothing else.
    Call { name: String, arguments: Map<String, Value> },
    /// JSON of this value.
    Json { json: Value },
    /// A JSON array of so many elements.
    JsonList { json_list: usize },
    /// It starts with this.
    Starts { starts: String },
    /// It is this.
    Text { text: String },
    /// A story of [`STORY_WORDS`] or more in which this occurs, in any case of letters.
    Story { about: String },
}

/// A story that is shorter is none.
const STORY_WORDS: usize = 50;

/// Counts of one task.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Score {
    task: String,
    prompts: usize,
    /// As expected, and ended by the model.
    right: usize,
    /// Ended by the model.
    stopped: usize,
    /// Thought if it was to, and only then.
    switch: usize,
}

#[derive(Serialize)]
struct Outcome {
    tasks: String,
    max_tokens: NonZeroUsize,
    scores: Vec<Score>,
}

/// Runs the command.
pub fn tasks(args: &TasksArgs) -> anyhow::Result<()> {
    let mut results = Results::open(&args.common)?;
    let rows = read(&args.file, args.each.map_or(usize::MAX, NonZeroUsize::get))?;
    let model = &args.common.model;
    let checkpoint = Arc::new(checkpoint::open(model.model.as_deref())?);
    let mut asker = Asker::load(model, &checkpoint)?;
    let bar = progress("answering", "prompts");
    bar.set_length(rows.len() as u64);
    let (mut scores, mut answers) = (Vec::<Score>::new(), String::new());
    for row in &rows {
        let prompt = asker.prompt(&row.messages, &row.tools, row.thinking)?;
        let Answer { reply, stopped } = asker.answer(&prompt, &row.tools, args.max_tokens.get())?;
        let right = stopped && row.expect.met(&reply);
        let score = match scores.iter_mut().position(|score| score.task == row.task) {
            Some(at) => &mut scores[at],
            None => {
                scores.push(Score { task: row.task.clone(), ..Score::default() });
                let last = scores.len() - 1;
                &mut scores[last]
            }
        };
        score.prompts += 1;
        score.right += usize::from(right);
        score.stopped += usize::from(stopped);
        score.switch += usize::from(obeyed(row.thinking, &reply));
        answers.push_str(&line(row, &reply, stopped, right));
        bar.inc(1);
    }
    bar.finish_and_clear();
    if let Some(file) = &args.answers {
        std::fs::write(file, answers).with_context(|| format!("cannot write {}", file.display()))?;
    }
    print(&asker.device(), &scores);
    let name = name(&args.file);
    let outcome = Outcome { tasks: name, max_tokens: args.max_tokens, scores };
    results.append("tasks", &args.common, &checkpoint, &asker.device(), &outcome)
}

/// The rows of a file, of each task at most `each`.
fn read(file: &Path, each: usize) -> anyhow::Result<Vec<Row>> {
    let name = file.display();
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {name}"))?;
    let mut rows: Vec<Row> = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let row: Row = serde_json::from_str(line).map_err(|error| {
            let expected = "expected task, messages, tools, thinking and expect with number, name and arguments, json, json_list, \
                            starts, text or about";
            Usage(format!("{name}, line {}: {error}; {expected}", number + 1))
        })?;
        if rows.iter().filter(|other| other.task == row.task).count() < each {
            rows.push(row);
        }
    }
    if rows.is_empty() {
        return Err(Usage(format!("{name} has no prompts: expected a JSON object on each line")).into());
    }
    Ok(rows)
}

impl Expected {
    /// Whether an answer is right.
    fn met(&self, reply: &Reply) -> bool {
        let content = reply.content.as_str();
        let json = || serde_json::from_str::<Value>(content).ok();
        match self {
            Expected::Call { name, arguments } => {
                let [call] = &reply.calls[..] else { return false };
                let given = serde_json::from_str::<Value>(&call.arguments).ok();
                call.complete && call.name == *name && content.is_empty() && given == Some(arguments.clone().into())
            }
            // What is expected besides a call comes without one.
            _ if !reply.calls.is_empty() => false,
            Expected::Number { number } => last_number(content) == Some(number),
            Expected::Json { json: expected } => json().as_ref() == Some(expected),
            Expected::JsonList { json_list } => json().is_some_and(|v| v.as_array().map(Vec::len) == Some(*json_list)),
            Expected::Starts { starts } => content.starts_with(starts),
            Expected::Text { text } => content == text,
            Expected::Story { about } => {
                let found = content.to_lowercase().contains(&about.to_lowercase());
                found && content.split_whitespace().count() >= STORY_WORDS
            }
        }
    }
}

/// The last run of digits, with a minus sign before it.
fn last_number(text: &str) -> Option<&str> {
    let end = text.rfind(|c: char| c.is_ascii_digit())? + 1;
    let start = text[..end]
        .rfind(|c: char| !c.is_ascii_digit())
        .map_or(0, |at| at + text[at..].chars().next().map_or(0, char::len_utf8));
    Some(&text[start - usize::from(text[..start].ends_with('-'))..end])
}

/// Whether the model thought if it was to, closed its think block, and only then.
fn obeyed(thinking: bool, reply: &Reply) -> bool {
    let answered = !(reply.content.is_empty() && reply.calls.is_empty());
    let tagged = reply.content.contains("think>");
    !tagged && if thinking { answered && !reply.reasoning.trim().is_empty() } else { reply.reasoning.is_empty() }
}

fn line(row: &Row, reply: &Reply, stopped: bool, right: bool) -> String {
    let calls: Vec<Value> = reply
        .calls
        .iter()
        .map(|call| serde_json::json!({"name": call.name, "arguments": call.arguments, "complete": call.complete}))
        .collect();
    let answer = serde_json::json!({
        "task": row.task, "right": right, "stopped": stopped, "reasoning": reply.reasoning, "content": reply.content, "calls": calls,
    });
    format!("{answer}\n")
}

fn print(device: &str, scores: &[Score]) {
    println!("{device}\n");
    println!("{:<16} {:>8} {:>8} {:>14} {:>18}", "task", "prompts", "right", "ends by itself", "thinks as it is told");
    let sum = |count: fn(&Score) -> usize| scores.iter().map(count).sum();
    let all = Score {
        task: "all".into(),
        prompts: sum(|s| s.prompts),
        right: sum(|s| s.right),
        stopped: sum(|s| s.stopped),
        switch: sum(|s| s.switch),
    };
    for score in scores.iter().chain([&all]) {
        let Score { task, prompts, right, stopped, switch } = score;
        println!("{task:<16} {prompts:>8} {right:>8} {stopped:>14} {switch:>18}");
    }
}

#[cfg(test)]
mod tests {
    use lily_engine::ToolCall;

    use super::*;

    fn expected(json: &str) -> Expected {
        serde_json::from_str(json).unwrap()
    }

    fn said(content: &str) -> Reply {
        Reply { content: content.into(), ..Reply::default() }
    }

    fn called(name: &str, arguments: &str) -> Reply {
        let call = ToolCall { name: name.into(), arguments: arguments.into(), complete: true };
        Reply { calls: vec![call], ..Reply::default() }
    }

    #[test]
    fn the_last_number_of_an_answer_counts() {
        for (text, number) in [("3 + 4 = 7.", "7"), ("2-5=-3", "-3"), ("é12", "12"), ("12é", "12"), ("1,000", "000")]
        {
            assert_eq!(last_number(text), Some(number), "{text}");
        }
        assert_eq!(last_number("none"), None);
    }

    #[test]
    fn answers_are_right_by_what_is_expected() {
        let story = format!("The FOX went out. {}", "word ".repeat(STORY_WORDS));
        for (expect, right, wrong) in [
            (r#"{"number": "7"}"#, "3 + 4 = 7.", "7 is 4 and 3"),
            (r#"{"json": {"a": 1}}"#, r#"{ "a": 1 }"#, r#"{"a": 2}"#),
            (r#"{"json_list": 2}"#, r#"["a", "b"]"#, r#"["a"]"#),
            (r#"{"starts": "I do not know."}"#, "I do not know. Sorry.", "I know."),
            (r#"{"text": "A fox."}"#, "A fox.", "A fox"),
            (r#"{"about": "fox"}"#, &story, "A fox."),
        ] {
            let expected = expected(expect);
            assert!(expected.met(&said(right)), "{expect}: {right}");
            assert!(!expected.met(&said(wrong)), "{expect}: {wrong}");
            let with_call = Reply { content: right.into(), ..called("f", "{}") };
            assert!(!expected.met(&with_call), "{expect}: a call besides");
        }
    }

    #[test]
    fn a_call_is_right_as_a_whole() {
        let expected = expected(r#"{"name": "add", "arguments": {"a": 1, "b": "x"}}"#);
        assert!(expected.met(&called("add", r#"{"b": "x", "a": 1}"#)));
        for wrong in [
            called("sub", r#"{"a": 1, "b": "x"}"#),
            called("add", r#"{"a": 1}"#),
            called("add", r#"{"a": "1", "b": "x"}"#),
            Reply { content: "Well:".into(), ..called("add", r#"{"a": 1, "b": "x"}"#) },
            said("add"),
        ] {
            assert!(!expected.met(&wrong), "{wrong:?}");
        }
    }

    #[test]
    fn thinking_is_held_against_the_switch() {
        let thought = |reasoning: &str, content: &str| Reply { reasoning: reasoning.into(), ..said(content) };
        assert!(obeyed(true, &thought("So it is.", "Yes.")) && obeyed(false, &said("Yes.")));
        assert!(obeyed(true, &Reply { reasoning: "So.".into(), ..called("f", "{}") }));
        assert!(!obeyed(true, &said("Yes.")) && !obeyed(true, &thought("So it is.", "")));
        assert!(!obeyed(false, &thought("So it is.", "Yes.")) && !obeyed(false, &said("</think>Yes.")));
    }

    #[test]
    fn expectations_that_are_none_are_refused() {
        for wrong in [r#"{}"#, r#"{"number": 7}"#, r#"{"text": "a", "starts": "b"}"#, r#"{"sum": "7"}"#] {
            assert!(serde_json::from_str::<Expected>(wrong).is_err(), "{wrong}");
        }
    }
}
