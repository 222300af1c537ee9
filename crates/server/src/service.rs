//! The engine's thread, and the handle that turns are started with.
//!
//! The engine lives on a thread of its own, because the device is driven by blocking calls. Requests go there through a channel; the
//! events of each come back through one of its own and are made an answer by whoever asks for it (`answering`), the task of
//! the connection: so the device never waits for the writing of JSON, and a token wakes one task.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use lily_engine::{Engine, EngineError, EngineStatus, Event, GenerateRequest, Grammars, Prompt, RequestId, TextModel};
use tokio::sync::{mpsc, oneshot};

use crate::answering::{self, Answering, Prepared};
use crate::metrics::Metrics;
use crate::turn::{TurnError, TurnRequest};
use crate::turns::{ModelInfo, Readiness, Starting, TokenAt, TurnStream, Turns};

/// Steps that may fail one after the other, each for the device's own reasons, before the server says that it is of no use.
const FAILURES: usize = 3;

/// How turns are served.
#[derive(Clone, Debug)]
pub struct ServiceSettings {
    /// Name of the model for clients.
    pub model: String,
    /// Longest time of a turn, waiting included; `None`: no limit.
    pub turn_limit: Option<Duration>,
    /// Longest time in which the engine does nothing for a turn that is in progress.
    pub stall_limit: Duration,
    /// Folder for a record of each turn: ids of the prompt, settings, ids and text of the answer.
    pub trace_dir: Option<PathBuf>,
}

impl Default for ServiceSettings {
    fn default() -> ServiceSettings {
        ServiceSettings {
            model: "lily".into(),
            turn_limit: None,
            // A chunk takes seconds where a large model runs on a slow processor, and others may have theirs between.
            stall_limit: Duration::from_secs(600),
            trace_dir: None,
        }
    }
}

/// Events of a request on their way to its answer, with the time at which the engine had them.
pub(crate) type EngineEvents = mpsc::UnboundedReceiver<EngineEvent>;
pub(crate) type EngineEvent = (Instant, Result<Event, EngineError>);

/// Serves turns with one engine.
pub struct Service {
    shared: Arc<Shared>,
    model: ModelInfo,
    commands: Mutex<Sender<Command>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the answers need, too.
pub(crate) struct Shared {
    pub(crate) text: Arc<TextModel>,
    pub(crate) settings: ServiceSettings,
    pub(crate) metrics: Arc<Metrics>,
    grammars: OnceLock<Result<Grammars, String>>,
    draining: AtomicBool,
    /// Failures of the device since it last finished an answer.
    failures: AtomicUsize,
    status: Mutex<EngineStatus>,
    /// Turns that were accepted and are not over.
    turns: AtomicUsize,
}

enum Command {
    Submit {
        prompt: Prompt,
        request: Box<GenerateRequest>,
        events: mpsc::UnboundedSender<EngineEvent>,
        accepted: oneshot::Sender<Result<(), EngineError>>,
    },
    Stop,
}

impl Service {
    /// Moves an engine to its thread.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(engine: Engine, settings: ServiceSettings) -> std::io::Result<Service> {
        Service::start_with(engine, settings, Arc::new(Metrics::new()))
    }

    /// Likewise, with counters that others share.
    pub(crate) fn start_with(
        engine: Engine,
        settings: ServiceSettings,
        metrics: Arc<Metrics>,
    ) -> std::io::Result<Service> {
        let created = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let model = ModelInfo { id: settings.model.clone(), created, context_tokens: engine.caps().max_context };
        let shared = Arc::new(Shared {
            text: Arc::clone(engine.text()),
            settings,
            metrics,
            grammars: OnceLock::new(),
            draining: AtomicBool::new(false),
            failures: AtomicUsize::new(0),
            status: Mutex::new(engine.status()),
            turns: AtomicUsize::new(0),
        });
        let (commands, received) = channel();
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || run(engine, &received, &own))?;
        Ok(Service { shared, model, commands: Mutex::new(commands), thread: Mutex::new(Some(thread)) })
    }

    /// What the engine is doing.
    pub(crate) fn status(&self) -> EngineStatus {
        *self.shared.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn submit(&self, prepared: &mut Prepared) -> Result<EngineEvents, TurnError> {
        let (events, received) = mpsc::unbounded_channel();
        let (accepted, answer) = oneshot::channel();
        let request = Box::new(std::mem::take(&mut prepared.request));
        let prompt = prepared.prompt.clone();
        let command = Command::Submit { prompt, request, events, accepted };
        let sent = self.commands.lock().unwrap_or_else(PoisonError::into_inner).send(command);
        sent.map_err(|_| TurnError::ShuttingDown)?;
        match answer.await {
            Ok(Ok(())) => Ok(received),
            Ok(Err(EngineError::Busy { .. })) => {
                Err(TurnError::Busy { retry_after: self.shared.metrics.typical_turn() })
            }
            Ok(Err(error)) => Err(error.into()),
            Err(_) => Err(TurnError::ShuttingDown),
        }
    }

    async fn start_turn(&self, request: TurnRequest) -> Result<TurnStream, TurnError> {
        match self.readiness() {
            Readiness::Ready => {}
            Readiness::Draining => return Err(TurnError::ShuttingDown),
            Readiness::Failed(reason) => return Err(TurnError::Failed(reason)),
        }
        // Rendering and tokenizing a long conversation takes tens of milliseconds.
        let shared = Arc::clone(&self.shared);
        let prepared = tokio::task::spawn_blocking(move || answering::prepare(&shared, request)).await;
        let mut prepared =
            prepared.map_err(|error| TurnError::Failed(format!("a request could not be read: {error}")))??;
        let events = self.submit(&mut prepared).await?;
        Ok(Box::new(Answering::new(TurnInProgress::new(&self.shared), prepared, events)))
    }
}

impl Turns for Service {
    fn start(&self, request: TurnRequest) -> Starting<'_> {
        Box::pin(async move {
            let started = self.start_turn(request).await;
            if let Err(error) = &started {
                self.shared.metrics.refused(error);
            }
            started
        })
    }

    fn model(&self) -> &ModelInfo {
        &self.model
    }

    fn text(&self) -> &Arc<TextModel> {
        &self.shared.text
    }

    fn readiness(&self) -> Readiness {
        if self.shared.failures.load(Ordering::Relaxed) >= FAILURES {
            return Readiness::Failed("the device keeps failing: see the log, and restart the server".into());
        }
        if self.shared.draining.load(Ordering::Relaxed) { Readiness::Draining } else { Readiness::Ready }
    }

    fn drain(&self) {
        self.shared.draining.store(true, Ordering::Relaxed);
    }

    fn in_progress(&self) -> usize {
        self.shared.turns.load(Ordering::Relaxed)
    }

    /// Stores what the cache has if there is a place, and frees the device.
    fn stop(&self) {
        self.drain();
        // A thread that has ended receives nothing.
        let _ = self.commands.lock().unwrap_or_else(PoisonError::into_inner).send(Command::Stop);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the engine's thread ended by a panic");
        }
    }

    fn written(&self, token: TokenAt) {
        self.shared.metrics.written(token);
    }

    fn metrics(&self) -> String {
        self.shared.metrics.text(&self.status())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        Turns::stop(self);
    }
}

impl Shared {
    /// The maker of constraints. The first call takes a while.
    pub(crate) fn grammars(&self) -> Result<&Grammars, TurnError> {
        let grammars = self.grammars.get_or_init(|| Grammars::new(Arc::clone(&self.text)));
        grammars.as_ref().map_err(|reason| TurnError::Failed(format!("answers cannot be constrained: {reason}")))
    }
}

/// Counts a turn as long as it is there.
pub(crate) struct TurnInProgress(pub(crate) Arc<Shared>);

impl TurnInProgress {
    fn new(shared: &Arc<Shared>) -> TurnInProgress {
        shared.turns.fetch_add(1, Ordering::Relaxed);
        TurnInProgress(Arc::clone(shared))
    }
}

impl Drop for TurnInProgress {
    fn drop(&mut self) {
        self.0.turns.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The engine's thread.
fn run(mut engine: Engine, commands: &Receiver<Command>, shared: &Shared) {
    let mut listeners = Listeners::default();
    loop {
        let next = if engine.is_idle() { commands.recv().map_err(|_| ()) } else { commands.try_recv().map_err(|_| ()) };
        match next {
            Ok(Command::Submit { prompt, request, events, accepted }) => {
                listeners.submit(&mut engine, prompt, *request, events, accepted);
                continue;
            }
            Ok(Command::Stop) => break,
            Err(()) if engine.is_idle() => break,
            Err(()) => {}
        }
        step(&mut engine, &mut listeners, shared);
        *shared.status.lock().unwrap_or_else(PoisonError::into_inner) = engine.status();
    }
    for (id, event) in engine.abandon("the server was stopped") {
        listeners.tell(id, Instant::now(), event);
    }
    drop(listeners);
    engine.clear_cache();
}

fn step(engine: &mut Engine, listeners: &mut Listeners, shared: &Shared) {
    let events = catch_unwind(AssertUnwindSafe(|| engine.step())).unwrap_or_else(|panic| {
        let message = message_of(&*panic);
        tracing::error!(message, "a step panicked; its requests have failed");
        catch_unwind(AssertUnwindSafe(|| engine.abandon(&message))).unwrap_or_default()
    });
    let had_at = Instant::now();
    for (id, event) in events {
        match &event {
            Ok(Event::Finished(_)) => shared.failures.store(0, Ordering::Relaxed),
            Err(EngineError::Backend(_)) => {
                shared.failures.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
        listeners.tell(id, had_at, event);
    }
}

fn message_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// Who wants to hear of which request.
#[derive(Default)]
struct Listeners(HashMap<RequestId, mpsc::UnboundedSender<EngineEvent>>);

impl Listeners {
    fn submit(
        &mut self,
        engine: &mut Engine,
        prompt: Prompt,
        request: GenerateRequest,
        events: mpsc::UnboundedSender<EngineEvent>,
        accepted: oneshot::Sender<Result<(), EngineError>>,
    ) {
        let cancel = request.cancel.clone();
        let result = engine.submit(prompt, request).map(|id| {
            self.0.insert(id, events);
        });
        if accepted.send(result).is_err() {
            // The client went away before its request was accepted.
            cancel.cancel();
        }
    }

    fn tell(&mut self, id: RequestId, had_at: Instant, event: Result<Event, EngineError>) {
        let is_last = matches!(event, Err(_) | Ok(Event::Finished(_)));
        if let Some(listener) = self.0.get(&id) {
            // One that is gone has cancelled.
            let _ = listener.send((had_at, event));
        }
        if is_last {
            self.0.remove(&id);
        }
    }
}
