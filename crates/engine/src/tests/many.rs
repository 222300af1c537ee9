//! Laws of several requests at a time, of the prefix cache and of its limits.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::{at_most, cold, prompt, run, text_of};
use crate::testing::{Call, Script, Scripted, text_model};
use crate::{
    CancelToken, Constraint, Engine, EngineError, EngineOptions, Event, FinishReason, GenerateRequest, Prompt,
    RequestId, SessionOptions, StoreOptions,
};

/// Four requests at a time, many sessions, states that grow by 16 tokens.
fn options() -> EngineOptions {
    EngineOptions {
        running: 4,
        waiting: 100,
        chunk: None,
        snapshot_every: 1000,
        sessions: SessionOptions { most: 8, memory: None, room: Some(16), store: None },
    }
}

fn engine(backend: Scripted, options: EngineOptions) -> Engine {
    Engine::with_options(Box::new(backend), text_model(), options).unwrap()
}

fn hashing() -> Scripted {
    Scripted::new(Script::Hash, 2).with_rows(8)
}

type Events = BTreeMap<RequestId, Vec<Result<Event, EngineError>>>;

/// All that happens until nothing is left to do.
fn drain(engine: &mut Engine) -> Events {
    let mut all = Events::new();
    while !engine.is_idle() {
        for (id, event) in engine.step() {
            all.entry(id).or_default().push(event);
        }
    }
    all
}

fn answer(events: &[Result<Event, EngineError>]) -> String {
    text_of(&events.iter().flatten().cloned().collect::<Vec<_>>())
}

/// A long text, the same for the same number.
fn words(seed: usize, length: usize) -> String {
    (0..length).map(|i| char::from(b'a' + ((i * 7 + seed * 13 + i * i * seed) % 26) as u8)).collect()
}

#[test]
fn requests_share_steps() {
    let backend = hashing();
    let calls = backend.calls.clone();
    let mut engine = engine(backend, options());
    for text in ["one", "two", "six", "ten"] {
        engine.submit(prompt(text), at_most(20)).unwrap();
    }
    drain(&mut engine);
    let calls = calls.lock().unwrap();
    let waits = calls.iter().filter(|call| **call == Call::Wait).count();
    let rows = calls.iter().filter(|call| matches!(call, Call::Feed(_) | Call::FeedSample)).count();
    assert_eq!(rows, 4 * 20);
    // Each prompt delays the others by one step.
    assert!(waits <= 20 + 2 * 4, "{waits} steps");
}

#[test]
fn a_long_prompt_delays_an_answer_by_one_chunk_at_a_time() {
    let backend = hashing();
    let calls = backend.calls.clone();
    let mut engine = engine(backend, options());
    engine.submit(prompt("short"), at_most(60)).unwrap();
    engine.step();
    engine.submit(prompt(&words(1, 200)), at_most(5)).unwrap();
    engine.submit(prompt(&words(2, 200)), at_most(5)).unwrap();
    drain(&mut engine);
    let mut chunks = 0;
    for call in calls.lock().unwrap().iter().skip(1) {
        match call {
            Call::Feed(_) => chunks += 1,
            Call::FeedSample | Call::Wait => chunks = 0,
            _ => {}
        }
        assert!(chunks <= 1, "two chunks without a token between them");
    }
}

#[test]
fn prompts_take_turns() {
    let mut engine = engine(hashing(), options());
    let long = engine.submit(prompt(&words(1, 800)), at_most(1)).unwrap();
    engine.step();
    let short = engine.submit(prompt(&words(2, 16)), at_most(1)).unwrap();
    let mut ends = Vec::new();
    while !engine.is_idle() {
        ends.extend(engine.step().into_iter().filter(|(_, e)| matches!(e, Ok(Event::Finished(_)))).map(|(id, _)| id));
    }
    assert_eq!(ends, [short, long]);
}

#[test]
fn more_requests_than_rows_take_turns() {
    for rows in [1, 2, 3] {
        let backend = Scripted::new(Script::Hash, 2).with_rows(rows);
        let mut engine = engine(backend, EngineOptions { running: 6, ..options() });
        let ids: Vec<RequestId> =
            (0..6).map(|seed| engine.submit(prompt(&words(seed, 20)), at_most(40)).unwrap()).collect();
        let mut tokens = BTreeMap::<RequestId, usize>::new();
        while !engine.is_idle() {
            for (id, event) in engine.step() {
                *tokens.entry(id).or_default() += usize::from(matches!(event, Ok(Event::Token(_))));
            }
            // Once all have begun none is far behind.
            let counts: Vec<usize> = ids.iter().map(|id| tokens.get(id).copied().unwrap_or(0)).collect();
            let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
            assert!(*most < 40 || *least > 25, "{rows} rows: {counts:?}");
        }
        assert!(ids.iter().all(|id| tokens[id] == 40));
    }
}

#[test]
fn what_does_not_fit_into_the_queue_is_refused_at_once() {
    let mut engine = engine(hashing(), EngineOptions { waiting: 2, ..options() });
    engine.submit(prompt("a"), at_most(1)).unwrap();
    engine.submit(prompt("b"), at_most(1)).unwrap();
    assert!(matches!(engine.submit(prompt("c"), at_most(1)), Err(EngineError::Busy { waiting: 2 })));
    engine.step();
    engine.submit(prompt("c"), at_most(1)).unwrap();
    assert_eq!(drain(&mut engine).len(), 3);
}

#[test]
fn a_waiting_request_can_be_cancelled() {
    let mut engine = engine(hashing(), EngineOptions { running: 1, ..options() });
    engine.submit(prompt("a"), at_most(30)).unwrap();
    engine.step();
    let cancel = CancelToken::default();
    let waiting = engine.submit(prompt("b"), GenerateRequest { cancel: cancel.clone(), ..at_most(30) }).unwrap();
    cancel.cancel();
    let first = engine.step().into_iter().find(|(id, _)| *id == waiting);
    assert!(matches!(first, Some((_, Ok(Event::Finished(end)))) if end.reason == FinishReason::Cancelled));
    drain(&mut engine);
}

#[test]
fn two_conversations_over_one_system_prompt_do_not_disturb_each_other() {
    let system = words(1, 400);
    let mut engine = engine(hashing(), options());
    let mut turns = [system.clone() + "first", system.clone() + "second"];
    for round in 0..2 {
        for conversation in &mut turns {
            let asked = Prompt { branches: vec![400], ..prompt(conversation) };
            let (text, end) = run(&mut engine, &asked, at_most(280));
            assert_eq!(text, cold(&asked, at_most(280)));
            // All but the last token of the answer and the new question.
            let known = if round > 0 { conversation.len() - " and?".len() - 1 } else { 400 };
            if round > 0 || conversation.ends_with("second") {
                assert_eq!(end.cached_tokens, known);
            }
            conversation.push_str(&text);
            conversation.push_str(" and?");
        }
    }
    assert_eq!(engine.status().cache.hits, 3);
}

#[test]
fn equal_prompts_at_once_are_read_once() {
    let backend = hashing();
    let calls = backend.calls.clone();
    let mut engine = engine(backend, options());
    let asked = Prompt { branches: vec![590], ..prompt(&words(3, 600)) };
    let ids: Vec<RequestId> = (0..3).map(|_| engine.submit(asked.clone(), at_most(5)).unwrap()).collect();
    // Another one does not wait for them.
    let other = engine.submit(prompt("other"), at_most(3)).unwrap();
    let mut ends = Vec::new();
    let mut events = Events::new();
    while !engine.is_idle() {
        for (id, event) in engine.step() {
            if let Ok(Event::Finished(end)) = &event {
                ends.push((id, end.cached_tokens));
            }
            events.entry(id).or_default().push(event);
        }
    }
    assert_eq!(ends[0].0, other);
    ends.sort_unstable();
    assert_eq!(ends, [(ids[0], 0), (ids[1], 590), (ids[2], 590), (other, 0)]);
    assert!(ids.iter().all(|id| answer(&events[id]) == cold(&asked, at_most(5))));
    let read: usize =
        calls.lock().unwrap().iter().map(|call| if let Call::Feed(ids) = call { ids.len() } else { 0 }).sum();
    assert_eq!(read, 600 + 2 * 10 + "other".len());
}

#[test]
fn a_prompt_goes_on_from_a_request_in_progress() {
    let mut engine = engine(hashing(), options());
    let first = Prompt { branches: vec![500], ..prompt(&words(3, 600)) };
    let second = Prompt { branches: vec![500], ..prompt(&(words(3, 500) + "and now?")) };
    let one = engine.submit(first.clone(), at_most(200)).unwrap();
    let mut events = Events::new();
    while !events.get(&one).is_some_and(|events| events.iter().flatten().any(|event| matches!(event, Event::Token(_))))
    {
        engine.step().into_iter().for_each(|(id, event)| events.entry(id).or_default().push(event));
    }
    let two = engine.submit(second.clone(), at_most(20)).unwrap();
    drain(&mut engine).into_iter().for_each(|(id, more)| events.entry(id).or_default().extend(more));
    let Some(Ok(Event::Finished(end))) = events[&two].last() else { panic!("no end") };
    assert_eq!(end.cached_tokens, 500);
    assert_eq!(answer(&events[&one]), cold(&first, at_most(200)));
    assert_eq!(answer(&events[&two]), cold(&second, at_most(20)));
}

#[test]
fn an_answer_that_is_asked_for_again_leaves_the_first() {
    let backend = hashing();
    let calls = backend.calls.clone();
    let mut engine = engine(backend, options());
    let question = Prompt { branches: vec![90], ..prompt(&words(3, 100)) };
    let (first, _) = run(&mut engine, &question, at_most(300));
    let (again, end) = run(&mut engine, &question, at_most(300));
    assert_eq!((again, end.cached_tokens), (first.clone(), 90));
    assert!(calls.lock().unwrap().contains(&Call::Fork(399)));
    let (_, end) = run(&mut engine, &prompt(&(words(3, 100) + &first + "!")), at_most(3));
    assert_eq!(end.cached_tokens, 399);
}

#[test]
fn a_request_finds_an_answer_that_has_just_ended() {
    let mut engine = engine(hashing(), options());
    let first = prompt(&words(3, 100));
    engine.submit(first.clone(), at_most(9)).unwrap();
    let mut events = Vec::new();
    while !events.iter().any(|(_, event)| matches!(event, Ok(Event::Finished(_)))) {
        events.extend(engine.step());
    }
    engine.submit(prompt(&(words(3, 100) + &cold(&first, at_most(9)) + "!")), at_most(1)).unwrap();
    let events = drain(&mut engine);
    let Some(Ok(Event::Finished(end))) = events[&RequestId(1)].last() else { panic!("no end") };
    assert_eq!(end.cached_tokens, 108);
}

#[test]
fn states_grow_with_their_answers_and_no_further_than_needed() {
    for steps in [1, 2] {
        let backend = Scripted::new(Script::Hash, steps).with_rows(8).with_memory(5000);
        let mut engine = engine(backend, options());
        let asked = prompt("grow");
        let (text, end) = run(&mut engine, &asked, GenerateRequest::default());
        assert_eq!((end.reason, end.generated_tokens), (FinishReason::ContextFull, 996));
        assert_eq!(text, cold(&asked, GenerateRequest::default()));
    }
}

#[test]
fn sessions_leave_when_others_need_their_memory() {
    // Rooms come in steps of 1024, the context has 1000: three states.
    let memory = SessionOptions { memory: Some(3000), ..options().sessions };
    for (backend, sessions) in
        [(hashing().with_memory(3000), options().sessions), (hashing().with_memory(9000), memory)]
    {
        let mut engine = engine(backend, EngineOptions { sessions, ..options() });
        let asked = |seed| Prompt { branches: vec![40], ..prompt(&words(seed, 50)) };
        for seed in 0..5 {
            run(&mut engine, &asked(seed), at_most(5));
        }
        assert_eq!((engine.status().parked, engine.status().cache.evictions), (3, 2));
        // The last one is there still.
        assert_eq!(run(&mut engine, &asked(4), at_most(5)).1.cached_tokens, 40);
        // Four at a time have to take turns.
        for seed in 10..14 {
            engine.submit(prompt(&words(seed, 50)), at_most(5)).unwrap();
        }
        let events = drain(&mut engine);
        assert!(events.values().flatten().all(Result::is_ok));
        assert_eq!(events.len(), 4);
    }
    let mut engine = engine(hashing().with_memory(500), options());
    let events: Vec<_> = engine.generate(&prompt("x"), at_most(5)).unwrap().collect();
    assert!(matches!(&events[..], [Err(EngineError::Backend(_))]), "{events:?}");
}

#[test]
fn snapshots_count_for_the_memory() {
    // A state takes 1000 for its tokens and 100 beside them, a snapshot 100.
    for (memory, snapshots) in [(1099, 0), (1199, 0), (1200, 1), (1399, 2), (5000, 4)] {
        let sessions = SessionOptions { memory: Some(memory), ..options().sessions };
        let backend = hashing().with_memory(9000).with_state_bytes(100);
        let mut engine = engine(backend, EngineOptions { sessions, ..options() });
        let asked = Prompt { branches: vec![10, 20, 30, 40], ..prompt(&words(1, 50)) };
        run(&mut engine, &asked, at_most(5));
        assert_eq!(engine.memory().snapshots, snapshots, "{memory}");
    }
}

#[test]
fn five_hundred_requests_keep_within_the_memory() {
    const MEMORY: usize = 8000;
    // A state takes 1000 for its tokens and 100 beside them, a snapshot 100.
    let sessions = SessionOptions { most: 64, memory: Some(MEMORY), ..options().sessions };
    let backend = hashing().with_memory(1 << 20).with_state_bytes(100);
    let mut engine = engine(backend, EngineOptions { sessions, waiting: 500, ..options() });
    for n in 0..500 {
        let (seed, length) = (n * n % 23, 20 + n * 37 % 400);
        let asked = Prompt { branches: vec![length / 3, length / 2], ..prompt(&words(seed, length)) };
        engine.submit(asked, at_most(1 + n % 9)).unwrap();
    }
    let mut ended = 0;
    while !engine.is_idle() {
        ended += engine.step().iter().filter(|(_, event)| matches!(event, Ok(Event::Finished(_)))).count();
        let memory = engine.memory();
        let used = memory.states * 1100 + memory.snapshots * 100;
        assert!(used <= MEMORY, "{} states, {} snapshots", memory.states, memory.snapshots);
    }
    assert_eq!(ended, 500);
    let cache = engine.status().cache;
    assert!(cache.hits > 20 && cache.evictions > 20, "{cache:?}");
    engine.clear_cache();
    assert_eq!((engine.memory().states, engine.memory().snapshots), (0, 0));
}

#[test]
fn a_device_error_fails_the_requests_of_its_step_and_no_others() {
    let mut engine = engine(hashing().failing_at(6), EngineOptions { running: 2, ..options() });
    for text in ["one", "two", "six"] {
        engine.submit(prompt(text), at_most(10)).unwrap();
    }
    let events = drain(&mut engine);
    let failed: Vec<bool> = events.values().map(|events| events.last().unwrap().is_err()).collect();
    assert_eq!(failed, [true, true, false]);
    assert_eq!(answer(&events[&RequestId(2)]), cold(&prompt("six"), at_most(10)));
    assert_eq!(run(&mut engine, &prompt("one"), at_most(10)).0, cold(&prompt("one"), at_most(10)));
}

#[test]
fn after_a_panic_the_engine_goes_on() {
    let mut engine = engine(hashing(), EngineOptions { running: 1, ..options() });
    let first = engine.submit(prompt("one"), at_most(10)).unwrap();
    let second = engine.submit(prompt("two"), at_most(10)).unwrap();
    engine.step();
    let events = engine.abandon("a test");
    assert!(events.iter().all(|(_, event)| event.is_err()));
    assert_eq!(events.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [first, second]);
    assert_eq!(run(&mut engine, &prompt("one"), at_most(10)).0, cold(&prompt("one"), at_most(10)));
}

/// Allows `a` and `b` in turns, from the third token on.
struct Alternating {
    seen: usize,
}

impl Constraint for Alternating {
    fn is_active(&self) -> bool {
        self.seen >= 2
    }

    fn mask(&mut self) -> Result<Vec<u32>, String> {
        let id = u32::from(b'a') + (self.seen % 2) as u32;
        let mut mask = vec![0; 4];
        mask[id as usize / 32] |= 1 << (id % 32);
        Ok(mask)
    }

    fn advance(&mut self, _: u32) -> Result<(), String> {
        self.seen += 1;
        if self.seen == 8 { Err("it is over".into()) } else { Ok(()) }
    }
}

#[test]
fn a_constraint_limits_its_own_answer_only() {
    let mut engine = engine(hashing(), options());
    let constraint = || Some(Box::new(Alternating { seen: 0 }) as Box<dyn Constraint>);
    let limited = engine.submit(prompt("p"), GenerateRequest { constraint: constraint(), ..at_most(7) }).unwrap();
    let free = engine.submit(prompt("p"), at_most(7)).unwrap();
    let events = drain(&mut engine);
    assert_eq!(answer(&events[&limited])[2..], *"ababa");
    assert_eq!(answer(&events[&limited])[..2], answer(&events[&free])[..2]);
    assert_eq!(answer(&events[&free]), cold(&prompt("p"), at_most(7)));
    let events: Vec<_> =
        engine.generate(&prompt("p"), GenerateRequest { constraint: constraint(), ..at_most(9) }).unwrap().collect();
    assert!(matches!(events.last(), Some(Err(EngineError::Constraint(_)))));
}

fn stored(folder: &std::path::Path, bytes: u64) -> EngineOptions {
    let store = Some(StoreOptions { folder: folder.to_owned(), bytes });
    EngineOptions { sessions: SessionOptions { store, ..options().sessions }, ..options() }
}

#[test]
fn a_restart_finds_the_sessions_again() {
    let folder = tempfile::tempdir().unwrap();
    let asked = Prompt { branches: vec![880], ..prompt(&words(5, 900)) };
    let mut first = engine(hashing(), stored(folder.path(), 1 << 20));
    let (text, _) = run(&mut first, &asked, at_most(20));
    assert!(Engine::with_options(Box::new(hashing()), text_model(), stored(folder.path(), 1 << 20)).is_err());
    first.clear_cache();
    drop(first);
    let mut second = engine(hashing(), stored(folder.path(), 1 << 20));
    let (again, end) = run(&mut second, &asked, at_most(20));
    assert_eq!((again, end.cached_tokens), (text, 880));
    assert_eq!(second.status().cache.loads, 1);
    // What was read is in memory now.
    assert_eq!(run(&mut second, &asked, at_most(20)).1.cached_tokens, 880);
    assert_eq!(second.status().cache.loads, 1);
}

#[test]
fn damaged_and_unfinished_files_are_never_used() {
    let asked = Prompt { branches: vec![880], ..prompt(&words(5, 900)) };
    let folder = tempfile::tempdir().unwrap();
    let mut first = engine(hashing(), stored(folder.path(), 1 << 20));
    run(&mut first, &asked, at_most(20));
    first.clear_cache();
    drop(first);
    let file = || {
        let files = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path());
        files.filter(|file| file.extension().is_some_and(|s| s == "session")).collect::<Vec<_>>()
    };
    let [name] = &file()[..] else { panic!("one file") };
    let whole = std::fs::read(name).unwrap();
    type Damage = fn(&mut Vec<u8>);
    let damages: [Damage; 7] = [
        |bytes| bytes.push(0),
        |bytes| bytes.truncate(10),
        |bytes| bytes.truncate(1000),
        |bytes| bytes.truncate(bytes.len() - 1),
        |bytes| bytes[3] ^= 1,
        |bytes| bytes[16] ^= 1,
        |bytes| bytes[100] ^= 1,
    ];
    for damage in damages {
        let mut bytes = whole.clone();
        damage(&mut bytes);
        std::fs::write(name, bytes).unwrap();
        std::fs::write(folder.path().join("0-1.unfinished"), &whole).unwrap();
        let mut engine = engine(hashing(), stored(folder.path(), 1 << 20));
        let (text, end) = run(&mut engine, &asked, at_most(20));
        assert_eq!((text, end.cached_tokens), (cold(&asked, at_most(20)), 0));
        assert!(file().is_empty() && !folder.path().join("0-1.unfinished").exists());
    }
}

#[test]
fn stored_sessions_keep_within_their_limit() {
    let folder = tempfile::tempdir().unwrap();
    // Each takes 4 bytes a token twice.
    let mut engine = engine(hashing(), stored(folder.path(), 3 * 8 * 700));
    for seed in 0..5 {
        run(&mut engine, &prompt(&words(seed, 600)), at_most(2));
    }
    engine.clear_cache();
    let files = std::fs::read_dir(folder.path()).unwrap().filter(|f| f.as_ref().unwrap().path().extension().is_some());
    assert_eq!(files.count(), 3);
}

proptest! {
    /// Whatever else happens, each answer is the one that the prompt has alone.
    #[test]
    fn answers_do_not_depend_on_other_requests(
        requests in prop::collection::vec(
            ("[ab]{1,3}", 0usize..3, 1usize..500, prop::collection::vec(0usize..500, 0..3), 1usize..30, 0usize..6, prop::bool::weighted(0.2)),
            1..14,
        ),
        steps_in_flight in 1usize..3,
        rows in 1usize..6,
        running in 1usize..5,
        memory in prop::option::of(2000usize..8000),
        store in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut options = if store { stored(folder.path(), 10_000) } else { options() };
        options.running = running;
        options.snapshot_every = 64;
        options.sessions.memory = memory;
        options.sessions.room = Some(3);
        let backend = Scripted::new(Script::Hash, steps_in_flight).with_rows(rows).with_memory(9000);
        let mut engine = engine(backend, options);
        let mut asked = BTreeMap::new();
        let mut events = Events::new();
        for (tail, seed, length, mut branches, max_tokens, steps, cancelled) in requests {
            branches.sort_unstable();
            let prompt = Prompt { branches, ..prompt(&(words(seed, length) + &tail)) };
            let cancel = CancelToken::default();
            let id = engine.submit(prompt.clone(), GenerateRequest { cancel: cancel.clone(), ..at_most(max_tokens) }).unwrap();
            asked.insert(id, (prompt, max_tokens));
            for _ in 0..steps {
                for (id, event) in engine.step() {
                    events.entry(id).or_default().push(event);
                }
            }
            if cancelled {
                cancel.cancel();
            }
        }
        for (id, more) in drain(&mut engine) {
            events.entry(id).or_default().extend(more);
        }
        for (id, (prompt, max_tokens)) in asked {
            let events = &events[&id];
            let ends = events.iter().filter(|event| matches!(event, Err(_) | Ok(Event::Finished(_)))).count();
            prop_assert_eq!(ends, 1);
            let Some(Ok(Event::Finished(end))) = events.last() else { panic!("{events:?}") };
            let expected = cold(&prompt, at_most(max_tokens));
            let answer = answer(events);
            match end.reason {
                FinishReason::Cancelled => prop_assert!(expected.starts_with(&answer)),
                _ => prop_assert_eq!(answer, expected),
            }
        }
        engine.clear_cache();
        prop_assert_eq!((engine.memory().states, engine.memory().snapshots), (0, 0));
    }
}
