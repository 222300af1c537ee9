//! Laws of the engine, against a backend that follows a script and checks the contract.

mod many;
mod single;

use crate::testing::{Script, Scripted, text_model};
use crate::{Engine, Event, Finished, GenerateRequest, Prompt, Token};

fn prompt(text: &str) -> Prompt {
    Prompt::from(text.bytes().map(u32::from).collect::<Vec<_>>())
}

fn at_most(max_tokens: usize) -> GenerateRequest {
    GenerateRequest { max_tokens: Some(max_tokens), ..GenerateRequest::default() }
}

fn tokens(events: &[Event]) -> Vec<Token> {
    events.iter().filter_map(|e| if let Event::Token(token) = e { Some(token.clone()) } else { None }).collect()
}

fn text_of(events: &[Event]) -> String {
    tokens(events).into_iter().map(|token| token.text).collect()
}

/// Text and end of a whole generation.
fn run(engine: &mut Engine, prompt: &Prompt, request: GenerateRequest) -> (String, Finished) {
    let events: Vec<Event> = engine.generate(prompt, request).unwrap().map(Result::unwrap).collect();
    let Some(Event::Finished(end)) = events.last() else { panic!("no end: {events:?}") };
    (text_of(&events), end.clone())
}

/// What an engine answers that did nothing before.
fn cold(prompt: &Prompt, request: GenerateRequest) -> String {
    run(&mut Engine::new(Box::new(Scripted::new(Script::Hash, 2)), text_model()), prompt, request).0
}
