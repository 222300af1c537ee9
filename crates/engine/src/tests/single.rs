//! Laws of one conversation at a time, against a backend that follows a script.

use lily_backend::{SamplingParams, Want};
use proptest::prelude::*;

use super::{at_most, cold, prompt, run, text_of, tokens};
use crate::testing::{Call, HOLES, STOP, Script, Scripted, THINK, VOCAB, VOCAB_LIMIT, text_model};
use crate::{CancelToken, Engine, EngineError, Event, FinishReason, GenerateRequest, Prompt, Sampling};

fn engine(backend: Scripted) -> Engine {
    Engine::new(Box::new(backend), text_model())
}

fn saying(text: &str, steps_in_flight: usize) -> Scripted {
    Scripted::new(Script::Tokens(text.bytes().map(u32::from).collect()), steps_in_flight)
}

#[test]
fn events_are_progress_then_tokens_then_the_end() {
    let mut engine = engine(saying("hé", 1));
    let events: Vec<_> =
        engine.generate(&prompt("ten bytes!"), GenerateRequest::default()).unwrap().map(Result::unwrap).collect();
    let progress = |done| Event::PromptProgress { done, total: 10 };
    assert_eq!(events[..3], [progress(0), progress(8), progress(10)]);
    let texts: Vec<String> = tokens(&events[3..events.len() - 1]).into_iter().map(|token| token.text).collect();
    assert_eq!(texts, ["h", "", "é"]);
    let Some(Event::Finished(end)) = events.last() else { panic!("no end") };
    assert_eq!(end.reason, FinishReason::StopToken(STOP));
    assert_eq!((end.prompt_tokens, end.cached_tokens, end.generated_tokens), (10, 0, 4));
}

#[test]
fn a_stop_token_at_once_is_an_empty_answer() {
    let mut engine = engine(saying("", 2));
    let (text, end) = run(&mut engine, &prompt("hi"), GenerateRequest::default());
    assert_eq!((text.as_str(), end.reason, end.generated_tokens), ("", FinishReason::StopToken(STOP), 1));
}

#[test]
fn two_steps_in_flight_are_submitted_before_the_first_is_waited_for() {
    let backend = saying("abc", 2);
    let calls = backend.calls.clone();
    let mut engine = engine(backend);
    run(&mut engine, &prompt("p"), GenerateRequest::default());
    use Call::{Feed, FeedSample, Reset, Wait};
    let first = Feed(vec![u32::from(b'p')]);
    let expected = [first, FeedSample, Wait, FeedSample, Wait, FeedSample, Wait, FeedSample, Wait, Wait];
    assert_eq!(*calls.lock().unwrap(), expected);
    // The stop token was fed before it was seen.
    assert_eq!(engine.parked_tokens(), ["pabc".bytes().map(u32::from).chain([STOP]).collect::<Vec<_>>()]);
    assert!(!calls.lock().unwrap().contains(&Reset));
}

#[test]
fn without_overlap_no_token_is_fed_before_it_was_seen() {
    for backend in [saying("ab", 1), saying("ab", 2).without_overlap()] {
        let calls = backend.calls.clone();
        let mut engine = engine(backend);
        run(&mut engine, &prompt("p"), GenerateRequest::default());
        use Call::{Feed, FeedSample, Wait};
        assert_eq!(*calls.lock().unwrap(), [Feed(vec![u32::from(b'p')]), Wait, FeedSample, Wait, FeedSample, Wait]);
        assert_eq!(engine.parked_tokens(), [[b'p', b'a', b'b'].map(u32::from)]);
    }
}

#[test]
fn a_limit_needs_no_step_beyond_it() {
    for steps_in_flight in [1, 2, 3] {
        let backend = saying("abcdef", steps_in_flight);
        let calls = backend.calls.clone();
        let mut engine = engine(backend);
        let (text, end) = run(&mut engine, &prompt("p"), at_most(3));
        assert_eq!((text.as_str(), end.reason), ("abc", FinishReason::Length));
        assert_eq!(calls.lock().unwrap().iter().filter(|call| **call == Call::FeedSample).count(), 2);
        assert_eq!(engine.parked_tokens(), [[b'p', b'a', b'b'].map(u32::from)]);
    }
}

#[test]
fn an_answer_without_a_limit_fills_the_context() {
    let mut engine = engine(Scripted::new(Script::Hash, 2).with_context(20));
    for request in [GenerateRequest::default(), at_most(500)] {
        let (text, end) = run(&mut engine, &prompt("12 bytes.."), request);
        assert_eq!((text.len(), end.generated_tokens, end.reason), (10, 10, FinishReason::ContextFull));
    }
    let (_, end) = run(&mut engine, &prompt("12 bytes.."), at_most(10));
    assert_eq!(end.reason, FinishReason::Length);
}

#[test]
fn stop_strings_cut_the_answer_over_token_borders() {
    for steps_in_flight in [1, 2] {
        let mut engine = engine(saying("alpha beta gamma delta", steps_in_flight));
        let stop = vec!["beta gamma".to_owned(), "nothing".to_owned()];
        let request = GenerateRequest { stop, ..GenerateRequest::default() };
        let (text, end) = run(&mut engine, &prompt("p"), request);
        assert_eq!((text.as_str(), end.reason), ("alpha ", FinishReason::StopString("beta gamma".into())));
        assert_eq!(end.generated_tokens, "alpha beta gamma".len());
    }
}

#[test]
fn what_a_stop_string_held_back_comes_at_the_end() {
    let mut engine = engine(saying("one two", 2));
    let request = || GenerateRequest { stop: vec!["two three".into()], ..GenerateRequest::default() };
    assert_eq!(run(&mut engine, &prompt("p"), request()).0, "one two");
    let (text, end) = run(&mut engine, &prompt("q"), GenerateRequest { max_tokens: Some(6), ..request() });
    assert_eq!((text.as_str(), end.reason), ("one tw", FinishReason::Length));
}

#[test]
fn think_tags_are_text_and_special_tokens_are_not() {
    let script = Script::Tokens(vec![THINK, u32::from(b'x'), STOP, u32::from(b'y')]);
    let mut engine = engine(Scripted::new(script, 2));
    let request = GenerateRequest { ignore_stop_tokens: true, ..at_most(4) };
    assert_eq!(run(&mut engine, &prompt("p"), request).0, "<think>xy");
}

#[test]
fn logprobs_stay_with_their_tokens() {
    let mut engine = engine(saying("a🌷b", 2));
    let request = GenerateRequest { logprobs: Some(2), stop: vec!["🌷c".into()], ..GenerateRequest::default() };
    let events: Vec<_> = engine.generate(&prompt("p"), request).unwrap().map(Result::unwrap).collect();
    let tokens = tokens(&events);
    assert_eq!(tokens.len(), "a🌷b".len());
    for token in tokens {
        let logprobs = token.logprobs.unwrap();
        assert_eq!(logprobs.chosen, -(token.id as f32));
        assert_eq!(logprobs.top.len(), 2);
    }
}

#[test]
fn a_prompt_that_continues_the_session_costs_only_the_rest() {
    let mut engine = engine(Scripted::new(Script::Hash, 2));
    let (answer, _) = run(&mut engine, &prompt("turn one"), at_most(7));
    let second = prompt(&format!("turn one{answer}, turn two"));
    let (text, end) = run(&mut engine, &second, at_most(9));
    // The last token of the first answer was not fed.
    assert_eq!(end.cached_tokens, "turn one".len() + 6);
    assert_eq!(text, cold(&second, at_most(9)));
}

#[test]
fn a_turn_that_renders_differently_goes_back_to_the_branch() {
    let backend = Scripted::new(Script::Hash, 2);
    let calls = backend.calls.clone();
    let mut engine = engine(backend);
    let first = Prompt { branches: vec![9], ..prompt("question:<think>") };
    run(&mut engine, &first, at_most(5));
    assert!(calls.lock().unwrap().contains(&Call::Snapshot(9)));
    let second = Prompt { branches: vec![9, 21], ..prompt("question:answer,again:<think>") };
    let (text, end) = run(&mut engine, &second, at_most(12));
    assert_eq!(end.cached_tokens, 9);
    assert_eq!(text, cold(&second, at_most(12)));
    // Another try of the same prompt goes back to its last branch.
    let (again, end) = run(&mut engine, &second, at_most(12));
    assert_eq!((end.cached_tokens, again), (21, text));
    // Another conversation starts over.
    assert_eq!(run(&mut engine, &prompt("new"), at_most(1)).1.cached_tokens, 0);
    assert_eq!(engine.memory().snapshots, 0);
}

#[test]
fn snapshots_of_a_session_are_bounded_and_go_with_it() {
    let mut engine = engine(Scripted::new(Script::Hash, 2));
    let long = Prompt { branches: (1..40).collect(), ..prompt(&"x".repeat(40)) };
    run(&mut engine, &long, at_most(1));
    assert_eq!(engine.memory().snapshots, 6);
    engine.clear_cache();
    assert_eq!((engine.memory().states, engine.memory().snapshots), (0, 0));
}

#[test]
fn cancelling_during_the_prompt_leaves_a_session_that_goes_on() {
    let mut engine = engine(Scripted::new(Script::Hash, 2));
    let text = prompt("a prompt of several chunks, cancelled after one");
    let cancel = CancelToken::default();
    let request = GenerateRequest { cancel: cancel.clone(), ..GenerateRequest::default() };
    let mut generation = engine.generate(&text, request).unwrap();
    assert!(matches!(generation.nth(1), Some(Ok(Event::PromptProgress { done: 8, .. }))));
    cancel.cancel();
    let Some(Ok(Event::Finished(end))) = generation.next() else { panic!("no end") };
    assert_eq!((end.reason, end.generated_tokens), (FinishReason::Cancelled, 0));
    assert!(generation.next().is_none());
    drop(generation);
    let (answer, end) = run(&mut engine, &text, at_most(10));
    assert_eq!((end.cached_tokens, answer), (8, cold(&text, at_most(10))));
}

#[test]
fn cancelling_or_dropping_during_the_answer_leaves_a_session_that_goes_on() {
    for drop_it in [false, true] {
        let mut engine = engine(Scripted::new(Script::Hash, 2));
        let cancel = CancelToken::default();
        let request = GenerateRequest { cancel: cancel.clone(), ..GenerateRequest::default() };
        let mut answer = String::new();
        for event in engine.generate(&prompt("p"), request).unwrap() {
            match event.unwrap() {
                Event::Token(token) => answer.push_str(&token.text),
                Event::Finished(end) => assert_eq!(end.reason, FinishReason::Cancelled),
                Event::PromptProgress { .. } => {}
            }
            if answer.len() == 5 {
                if drop_it {
                    break;
                }
                cancel.cancel();
            }
        }
        assert_eq!(answer.len(), 5);
        let next = prompt(&format!("p{answer} and on"));
        let (text, end) = run(&mut engine, &next, at_most(10));
        // The discarded step had fed the fifth token.
        assert_eq!((end.cached_tokens, text), (6, cold(&next, at_most(10))));
    }
}

#[test]
fn after_a_device_error_the_next_request_works() {
    // The state is made first: tickets 2 and 3 are the prompt's chunks, 4 to 6 feed samples.
    for ticket in 2..=6 {
        let mut engine = engine(Scripted::new(Script::Hash, 2).failing_at(ticket));
        let text = prompt("ten bytes!");
        let events: Vec<_> = engine.generate(&text, GenerateRequest::default()).unwrap().collect();
        assert!(
            matches!(events.last(), Some(Err(EngineError::Backend(error))) if matches!(**error, lily_backend::Error::Device(_)))
        );
        assert_eq!(events.iter().filter(|event| event.is_err()).count(), 1);
        let (answer, end) = run(&mut engine, &text, at_most(20));
        assert_eq!((end.cached_tokens, answer), (0, cold(&text, at_most(20))));
    }
}

#[test]
fn a_failed_step_beyond_the_end_does_not_spoil_the_answer() {
    // Tickets 2 to 4 are the prompt, "a" and the stop token's.
    let mut engine = engine(saying("a", 2).failing_at(4));
    let (text, end) = run(&mut engine, &prompt("p"), GenerateRequest::default());
    assert_eq!((text.as_str(), end.reason), ("a", FinishReason::StopToken(STOP)));
    assert!(engine.parked_tokens().is_empty());
    assert_eq!(run(&mut engine, &prompt("pa"), at_most(1)).1.cached_tokens, 0);
}

#[test]
fn wrong_requests_are_refused_before_they_touch_the_device() {
    let backend = saying("abc", 2);
    let calls = backend.calls.clone();
    let mut engine = engine(backend.with_context(100));
    let fine = GenerateRequest::default;
    let hot = Sampling { temperature: Some(9.0), ..Sampling::default() };
    for (ids, request, message) in [
        (vec![], fine(), "prompt: found no tokens, allowed at least one token"),
        (vec![VOCAB as u32], fine(), "prompt: found token id 300, allowed ids below 300"),
        (vec![1], at_most(0), "max_tokens: found 0, allowed 1 or more"),
        (vec![1], GenerateRequest { logprobs: Some(21), ..fine() }, "top_logprobs: found 21, allowed 0 to 20"),
        (vec![1], GenerateRequest { sampling: hot, ..fine() }, "temperature: found 9, allowed 0 to 2"),
        (vec![1], GenerateRequest { stop: vec![String::new()], ..fine() }, "stop: found an empty string"),
        (vec![1; 100], fine(), "the prompt has 100 tokens, the context holds 100 with the answer"),
    ] {
        let error = engine.generate(&ids.into(), request).map(drop).unwrap_err();
        assert!(error.to_string().starts_with(message), "{error}");
    }
    assert!(calls.lock().unwrap().is_empty());
}

#[test]
fn sampling_reaches_the_backend_completed_and_masked_to_the_tokenizer() {
    let backend = saying("a", 1);
    let wants = backend.wants.clone();
    let mut engine = engine(backend);
    let sampling =
        Sampling { temperature: Some(0.5), top_k: Some(7), logit_bias: Some(vec![(1, 2.0)]), ..Sampling::default() };
    let request = GenerateRequest { sampling, logprobs: Some(0), ..GenerateRequest::default() };
    let seed = engine
        .generate(&prompt("three"), request)
        .unwrap()
        .map(Result::unwrap)
        .find_map(|event| if let Event::Finished(end) = event { Some(end.seed) } else { None });
    let expected = SamplingParams {
        temperature: 0.5,
        top_k: 7,
        penalty_start: 5,
        seed: seed.unwrap(),
        logprobs: Some(0),
        logit_bias: [(1, 2.0)].into_iter().chain(HOLES.map(|id| (id, -1e9))).collect(),
        // The backend has more ids.
        ..SamplingParams::greedy(VOCAB_LIMIT)
    };
    for want in wants.lock().unwrap().iter() {
        let Want::Token(params) = want else { panic!("{want:?}") };
        assert_eq!(*params, expected);
    }
}

#[test]
fn an_engine_can_move_to_a_thread() {
    fn moves<T: Send>() {}
    moves::<(Engine, GenerateRequest)>();
}

proptest! {
    /// Whatever a session went through, its answers are those of a fresh one.
    #[test]
    fn reuse_never_changes_an_answer(
        turns in prop::collection::vec(("[ab]{1,12}", prop::collection::vec(0usize..14, 0..3), 1usize..6, 0usize..16), 1..8),
        steps_in_flight in 1usize..3,
    ) {
        let mut engine = engine(Scripted::new(Script::Hash, steps_in_flight));
        for (text, mut branches, max_tokens, stop_after) in turns {
            branches.sort_unstable();
            let prompt = Prompt { branches, ..prompt(&text) };
            let expected = cold(&prompt, at_most(max_tokens));
            let generation = engine.generate(&prompt, at_most(max_tokens)).unwrap();
            let events: Vec<Event> = generation.take(stop_after).map(Result::unwrap).collect();
            let answer = text_of(&events);
            let is_whole = matches!(events.last(), Some(Event::Finished(_)));
            prop_assert!(expected.starts_with(&answer));
            prop_assert!(!is_whole || answer == expected);
            prop_assert!(engine.memory().snapshots <= 6);
        }
    }
}
