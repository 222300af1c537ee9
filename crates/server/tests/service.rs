//! Turns from end to end: the service, the engine and the parser over a script.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use lily_engine::{Engine, EngineOptions, SessionOptions, TextModel};
use lily_model::chat::Chat;
use lily_model::{Config, Source};
use lily_server::replicas::Replicas;
use lily_server::script::{Script, ScriptBackend};
use lily_server::service::{Service, ServiceSettings};
use lily_server::turn::{Format, Input, ToolChoice, TurnEnd, TurnError, TurnEvent, TurnReason, TurnRequest};
use lily_server::turns::{Readiness, TurnStream, Turns};
use lily_server::{Router, Settings, life};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

/// The demo checkpoint's text side.
fn text() -> Arc<TextModel> {
    static TEXT: LazyLock<Arc<TextModel>> = LazyLock::new(|| {
        let source = Source::Directory(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo"));
        let config = Config::parse("config.json", &source.read("config.json").unwrap()).unwrap();
        Arc::new(TextModel::load(&source, &config).unwrap())
    });
    TEXT.clone()
}

fn options() -> EngineOptions {
    EngineOptions {
        running: 4,
        waiting: 2,
        sessions: SessionOptions { most: 16, memory: None, room: Some(512), store: None },
        ..EngineOptions::single()
    }
}

fn service_with(script: &str, options: EngineOptions, settings: ServiceSettings) -> Service {
    let backend = ScriptBackend::new(Script::parse(script).unwrap(), text(), ScriptBackend::caps(&text())).unwrap();
    Service::start(Engine::with_options(Box::new(backend), text(), options).unwrap(), settings).unwrap()
}

fn service(script: &str) -> Service {
    service_with(script, options(), ServiceSettings::default())
}

fn line(output: &str) -> String {
    json!({"output": output}).to_string()
}

fn chat(messages: Value) -> Chat {
    Chat { messages, add_generation_prompt: true, ..Chat::default() }
}

fn ask(question: &str) -> TurnRequest {
    TurnRequest::new(Input::Chat(chat(json!([{"role": "user", "content": question}]))))
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
    }}}])
}

fn ask_with_tools(question: &str, tool_choice: ToolChoice) -> TurnRequest {
    let chat = Chat { tools: tools(), ..chat(json!([{"role": "user", "content": question}])) };
    TurnRequest { tool_choice, ..TurnRequest::new(Input::Chat(chat)) }
}

const CALL: &str = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>";

/// All of an answer.
#[derive(Debug, Default)]
struct Whole {
    reasoning: String,
    content: String,
    calls: Vec<(String, String)>,
    logprobs: usize,
    end: Option<TurnEnd>,
}

async fn collect(mut stream: TurnStream) -> Result<Whole, TurnError> {
    let mut whole = Whole::default();
    while let Some(event) = stream.next().await {
        match event.event? {
            TurnEvent::Reasoning(text) => whole.reasoning += &text,
            TurnEvent::Content(text) => whole.content += &text,
            TurnEvent::CallBegun { name, .. } => whole.calls.push((name, String::new())),
            TurnEvent::Arguments { index, json } => whole.calls[index].1 += &json,
            TurnEvent::LogProb(_) => whole.logprobs += 1,
            TurnEvent::Finished(end) => whole.end = Some(end),
            TurnEvent::Started { .. } | TurnEvent::Progress { .. } | TurnEvent::CallEnded { .. } => {}
        }
    }
    Ok(whole)
}

async fn answer(service: &Service, request: TurnRequest) -> Result<Whole, TurnError> {
    collect(service.start(request).await?).await
}

fn reason(whole: &Whole) -> &TurnReason {
    &whole.end.as_ref().unwrap().reason
}

#[tokio::test]
async fn thinking_content_and_calls_are_told_apart() {
    let service = service(&line(&format!("<think>\nWhere?\n</think>\n\nI look.\n\n{CALL}")));
    let whole = answer(&service, ask_with_tools("Is it warm?", ToolChoice::Auto)).await.unwrap();
    assert_eq!((whole.reasoning.as_str(), whole.content.as_str()), ("Where?", "I look."));
    assert_eq!(whole.calls, [("weather".to_owned(), r#"{"city":"Rome"}"#.to_owned())]);
    assert_eq!(reason(&whole), &TurnReason::ToolCalls);
    let usage = whole.end.unwrap().usage;
    assert!(usage.reasoning_tokens > 0 && usage.reasoning_tokens < usage.completion_tokens);
}

#[tokio::test]
async fn a_call_inside_an_open_think_block_is_a_call() {
    let service = service(&line(&format!("<think>\nI look.\n{CALL}")));
    let whole = answer(&service, ask_with_tools("Is it warm?", ToolChoice::Auto)).await.unwrap();
    assert_eq!((whole.calls.len(), reason(&whole)), (1, &TurnReason::ToolCalls));
}

#[tokio::test]
async fn tool_choice_and_parallel_calls_are_held_to() {
    let service = service(&line(&format!("<think>\nHm.\n</think>\n\nSunny, I think. {CALL}\n{CALL}")));
    let none = answer(&service, ask_with_tools("a", ToolChoice::None)).await.unwrap();
    assert!(none.calls.is_empty() && !none.content.contains("<tool_call>"), "{none:?}");
    let both = answer(&service, ask_with_tools("a", ToolChoice::Auto)).await.unwrap();
    assert_eq!((both.calls.len(), both.content.as_str()), (2, "Sunny, I think."));
    let one = TurnRequest { parallel_tool_calls: false, ..ask_with_tools("a", ToolChoice::Auto) };
    let one = answer(&service, one).await.unwrap();
    assert_eq!((one.calls.len(), reason(&one)), (1, &TurnReason::ToolCalls));
    for choice in [ToolChoice::Required, ToolChoice::Function("weather".into())] {
        let forced = answer(&service, ask_with_tools("a", choice)).await.unwrap();
        assert_eq!((forced.reasoning.as_str(), forced.content.as_str()), ("Hm.", ""));
        assert_eq!(forced.calls[0], ("weather".to_owned(), r#"{"city":"Rome"}"#.to_owned()));
    }
    let unknown = answer(&service, ask_with_tools("a", ToolChoice::Function("wind".into()))).await.unwrap_err();
    assert!(matches!(&unknown, TurnError::Invalid { field: Some(field), .. } if field == "tool_choice"), "{unknown}");
}

#[tokio::test]
async fn formats_begin_behind_the_thinking() {
    let service = service(&line("<think>\n{No}\n</think>\n\nSure: {\"a\": 1}"));
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    for format in [Format::JsonObject, Format::JsonSchema(schema)] {
        let whole =
            answer(&service, TurnRequest { format: format.clone(), max_tokens: Some(60), ..ask("a") }).await.unwrap();
        assert_eq!((whole.reasoning.as_str(), whole.content.as_str()), ("{No}", "{\"a\": 1}"));
        let Input::Chat(chat) = ask("a").input else { panic!() };
        let quick = Input::Chat(Chat { enable_thinking: Some(false), ..chat });
        let whole =
            answer(&service, TurnRequest { format, max_tokens: Some(60), ..TurnRequest::new(quick) }).await.unwrap();
        assert_eq!((whole.reasoning.as_str(), whole.content.as_str()), ("", "{\"a\": 1}"));
    }
    let bad = TurnRequest { format: Format::JsonSchema(json!({"type": "odd"})), ..ask("a") };
    assert!(
        matches!(answer(&service, bad).await, Err(TurnError::Invalid { field: Some(field), .. }) if field == "response_format")
    );
}

#[tokio::test]
async fn thinking_ends_with_its_budget() {
    let service = service(&line("<think>\none two three four five six seven eight nine ten\n</think>\n\nDone."));
    let request = TurnRequest { max_thinking_tokens: Some(4), ..ask("a") };
    let whole = answer(&service, request).await.unwrap();
    assert!(whole.reasoning.starts_with("one") && !whole.reasoning.contains("ten"), "{whole:?}");
    // What closes the block counts as part of it.
    assert!(whole.end.unwrap().usage.reasoning_tokens < 10);
}

#[tokio::test]
async fn ends_say_why() {
    let service = service(&line(&format!("<think>\nHm.\n</think>\n\none two three {CALL}")));
    let stopped = answer(&service, TurnRequest { stop: vec!["two".into()], ..ask("a") }).await.unwrap();
    assert_eq!((stopped.content.as_str(), reason(&stopped)), ("one ", &TurnReason::StopString("two".into())));
    let whole = answer(&service, ask_with_tools("a", ToolChoice::Auto)).await.unwrap();
    let all = whole.end.unwrap().usage.completion_tokens;
    // A cut in a call is a cut.
    for most in 1..all + 3 {
        let request = TurnRequest { max_tokens: Some(most), ..ask_with_tools("a", ToolChoice::Auto) };
        let whole = answer(&service, request).await.unwrap();
        let tokens = whole.end.as_ref().unwrap().usage.completion_tokens;
        assert_eq!(tokens, most.min(all));
        assert_eq!(*reason(&whole) == TurnReason::Length, most < all, "{whole:?}");
        for (_, arguments) in &whole.calls {
            assert!(arguments.is_empty() || serde_json::from_str::<Value>(arguments).is_ok(), "{arguments}");
        }
    }
}

#[tokio::test]
async fn log_probabilities_come_for_each_token() {
    let service = service(&line("<think>\nHm.\n</think>\n\nYes."));
    let whole = answer(&service, TurnRequest { logprobs: Some(3), ..ask("a") }).await.unwrap();
    // The stop token has none.
    assert_eq!(whole.logprobs, whole.end.unwrap().usage.completion_tokens - 1);
}

#[tokio::test]
async fn the_next_turn_of_a_conversation_finds_the_last() {
    let service =
        service(&[line("<think>\nOne.\n</think>\n\nFirst."), line("<think>\nTwo.\n</think>\n\nSecond.")].join("\n"));
    let system = "You are a patient helper. ".repeat(20);
    let mut messages = vec![json!({"role": "system", "content": system}), json!({"role": "user", "content": "One?"})];
    let request = |messages: &[Value]| TurnRequest::new(Input::Chat(chat(json!(messages))));
    let first = answer(&service, request(&messages)).await.unwrap();
    messages.push(json!({"role": "assistant", "content": first.content, "reasoning_content": first.reasoning}));
    messages.push(json!({"role": "user", "content": "Two?"}));
    let second = answer(&service, request(&messages)).await.unwrap();
    assert_eq!(second.content, "Second.");
    let (before, after) = (first.end.unwrap().usage, second.end.unwrap().usage);
    // Up to the header of the first answer, which is shown without its thinking now.
    assert!(after.cached_tokens >= before.prompt_tokens - 5, "{before:?} {after:?}");
    // Another question at the same place.
    messages[1] = json!({"role": "user", "content": "Three?"});
    let edited = answer(&service, request(&messages[..2])).await.unwrap();
    assert!(edited.end.unwrap().usage.cached_tokens > 60);
}

/// A token wakes whoever reads the stream, and no other task on the way.
#[tokio::test]
async fn a_turn_is_answered_without_a_task_of_its_own() {
    let service = service(&slow());
    let mut stream = service.start(ask("a")).await.unwrap();
    while !matches!(stream.next().await.unwrap().event.unwrap(), TurnEvent::Content(_)) {}
    assert_eq!(tokio::runtime::Handle::current().metrics().num_alive_tasks(), 0);
}

/// A pace at which a test can step in.
const SLOW: &str = "{\"tokens_per_second\": 50}\n";

fn slow() -> String {
    SLOW.to_owned() + &line(&"word ".repeat(400))
}

async fn until(mut condition: impl FnMut() -> bool) {
    for _ in 0..500 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it did not happen within 5 s");
}

fn running(service: &Service) -> bool {
    !service.metrics().contains("lily_requests_running 0")
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_place() {
    let service = service(&slow());
    for tokens in [0, 1, 5] {
        let mut stream = service.start(ask("a")).await.unwrap();
        let mut seen = 0;
        while seen < tokens {
            seen += usize::from(matches!(stream.next().await.unwrap().event.unwrap(), TurnEvent::Content(_)));
        }
        drop(stream);
        until(|| service.in_progress() == 0 && !running(&service)).await;
    }
}

#[tokio::test]
async fn more_than_the_queue_holds_are_told_to_come_again() {
    let service =
        service_with(&slow(), EngineOptions { running: 1, waiting: 1, ..options() }, ServiceSettings::default());
    let mut first = service.start(ask("a")).await.unwrap();
    while !matches!(first.next().await.unwrap().event.unwrap(), TurnEvent::Content(_)) {}
    let second = service.start(ask("b")).await.unwrap();
    let third = service.start(ask("c")).await;
    assert!(matches!(third, Err(TurnError::Busy { retry_after }) if retry_after >= Duration::from_secs(1)));
    drop(first);
    let mut second = second;
    while !matches!(second.next().await.unwrap().event.unwrap(), TurnEvent::Content(_)) {}
}

#[tokio::test]
async fn a_drained_service_finishes_what_it_has() {
    let service = service(&line("Hello!"));
    let stream = service.start(ask("a")).await.unwrap();
    service.drain();
    assert_eq!(service.readiness(), Readiness::Draining);
    assert!(matches!(service.start(ask("b")).await, Err(TurnError::ShuttingDown)));
    assert_eq!(collect(stream).await.unwrap().content, "Hello!");
}

#[tokio::test]
async fn a_stopped_service_ends_its_turns_with_an_error() {
    let service = service(&slow());
    let stream = service.start(ask("a")).await.unwrap();
    service.stop();
    assert!(collect(stream).await.is_err());
    assert!(service.start(ask("b")).await.is_err());
}

#[tokio::test]
async fn a_failing_device_fails_the_turn_and_the_next_one_works() {
    let fails = json!({"when": "fail", "output": "So far", "error": "unplugged"}).to_string();
    let service = service(&[fails, line("Fine.")].join("\n"));
    for _ in 0..2 {
        let error = answer(&service, ask("Please fail.")).await.unwrap_err();
        assert!(error.to_string().contains("unplugged"), "{error}");
        assert_eq!(answer(&service, ask("Please work.")).await.unwrap().content, "Fine.");
    }
    for _ in 0..3 {
        answer(&service, ask("Please fail.")).await.unwrap_err();
    }
    assert!(matches!(service.readiness(), Readiness::Failed(_)));
}

#[tokio::test]
async fn a_turn_that_takes_too_long_is_ended() {
    let settings = ServiceSettings { turn_limit: Some(Duration::from_millis(200)), ..ServiceSettings::default() };
    let service = service_with(&slow(), options(), settings);
    let error = answer(&service, ask("a")).await.unwrap_err();
    assert!(matches!(error, TurnError::TimedOut(_)), "{error}");
    until(|| !running(&service)).await;
}

#[tokio::test]
async fn records_hold_what_was_read_and_written() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ServiceSettings { trace_dir: Some(folder.path().to_owned()), ..ServiceSettings::default() };
    let service = service_with(&line("Hello!"), options(), settings);
    answer(&service, ask("a")).await.unwrap();
    let records = || std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().path()).collect::<Vec<_>>();
    until(|| records().iter().any(|file| std::fs::read(file).is_ok_and(|bytes| bytes.ends_with(b"}\n")))).await;
    let record: Value = serde_json::from_slice(&std::fs::read(&records()[0]).unwrap()).unwrap();
    assert!(record["output"].as_str().unwrap().contains("Hello!"));
    assert!(record["prompt_ids"].as_array().unwrap().len() > 5);
}

/// Many turns at a time, each its own answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn turns_are_not_mixed_up() {
    let script: Vec<String> = (0..20)
        .map(|n| json!({"when": format!("number {n}."), "output": format!("answer {n} ").repeat(20)}).to_string())
        .collect();
    let options = EngineOptions { waiting: 100, ..options() };
    let service = Arc::new(service_with(&script.join("\n"), options, ServiceSettings::default()));
    let turns: Vec<_> = (0..60)
        .map(|n| {
            let service = Arc::clone(&service);
            tokio::spawn(async move { answer(&service, ask(&format!("number {}.", n % 20))).await.unwrap().content })
        })
        .collect();
    for (n, turn) in turns.into_iter().enumerate() {
        assert_eq!(turn.await.unwrap(), format!("answer {} ", n % 20).repeat(20));
    }
}

/// The body of the answer to a POST on a connection that stays open, as it comes.
async fn post(connection: &mut TcpStream, body: &Value) -> String {
    let body = body.to_string();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json";
    let request = format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    while !answer.ends_with("\r\n0\r\n\r\n") && !answer.ends_with('}') {
        let mut piece = [0; 4096];
        let length = connection.read(&mut piece).await.unwrap();
        assert!(length > 0, "{answer}");
        answer.push_str(std::str::from_utf8(&piece[..length]).unwrap());
    }
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_token_is_timed_once_to_its_connection() {
    let turns: Arc<dyn Turns> = Arc::new(service(&line("A fox sang. A hen sang.")));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = lily_server::router(Arc::clone(&turns), Settings::default(), Router::new());
    let (stop, stopped) = oneshot::channel::<()>();
    let told = async {
        let _ = stopped.await;
    };
    let server = tokio::spawn(life::serve(Arc::clone(&turns), router, listener, Duration::from_secs(5), told));
    let timed = || {
        let metrics = turns.metrics();
        let counts = ["lily_token_to_socket_seconds_count ", "lily_token_task_to_socket_seconds_count "].map(|name| {
            let count = metrics.lines().find_map(|line| line.strip_prefix(name));
            count.unwrap().parse::<usize>().unwrap()
        });
        counts.iter().all(|count| *count == counts[0]).then_some(counts[0])
    };
    let mut connection = TcpStream::connect(address).await.unwrap();
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "enable_thinking": false, "stream": true});
    let mut seen = 0;
    for _ in 0..3 {
        let streamed = post(&mut connection, &body).await;
        seen += streamed.matches("{\"content\":\"").count();
        assert!(seen > 0, "{streamed}");
        // The client may read before the server has looked at the clock.
        until(|| timed() == Some(seen)).await;
        // A whole answer is none of the stream before it.
        let whole = post(&mut connection, &json!({"messages": body["messages"], "enable_thinking": false})).await;
        assert!(whole.contains("A fox sang."), "{whole}");
        assert_eq!(timed(), Some(seen));
    }
    drop(connection);
    stop.send(()).unwrap();
    server.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_conversation_stays_with_its_replica() {
    let script = line("Fine.");
    let engine = || {
        let caps = ScriptBackend::caps(&text());
        let backend = ScriptBackend::new(Script::parse(&script).unwrap(), text(), caps).unwrap();
        Engine::with_options(Box::new(backend), text(), options()).unwrap()
    };
    let replicas = Replicas::start(vec![engine(), engine(), engine()], &ServiceSettings::default()).unwrap();
    for round in 0..4 {
        for conversation in 0..9 {
            // No two conversations have a beginning in common.
            let system = format!("{} You are a patient helper.", char::from(b'a' + conversation));
            let messages =
                json!([{"role": "system", "content": system}, {"role": "user", "content": format!("{round}?")}]);
            let affinity = (conversation % 2 == 0).then(|| conversation.to_string());
            let request = TurnRequest { affinity, ..TurnRequest::new(Input::Chat(chat(messages))) };
            let stream = replicas.start(request).await.unwrap();
            let usage = collect(stream).await.unwrap().end.unwrap().usage;
            // One without a name is known by its first question, and may be anywhere with another one.
            if round == 0 || conversation % 2 == 0 {
                assert_eq!(round > 0, usage.cached_tokens > 3, "{usage:?}");
            }
        }
    }
    assert!(replicas.metrics().contains("lily_turns_total{outcome=\"stop\"} 36"));
    replicas.drain();
    assert_eq!((replicas.readiness(), replicas.in_progress()), (Readiness::Draining, 0));
    replicas.stop();
}
