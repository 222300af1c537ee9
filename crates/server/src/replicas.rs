//! Several engines with the same model, one per device: each conversation stays with the one that has it cached.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

use lily_engine::{Engine, EngineStatus, TextModel};

use crate::metrics::Metrics;
use crate::service::{Service, ServiceSettings};
use crate::turn::{Input, TurnRequest};
use crate::turns::{ModelInfo, Readiness, Starting, TokenAt, Turns};

/// Conversations whose place is remembered. Those forgotten are as new.
const MOST_PLACES: usize = 10_000;

/// Messages that tell conversations apart, as long as the client does not name them: the system message and the first question.
const FIRST_MESSAGES: usize = 2;
/// Likewise of a prompt that is no conversation: bytes or tokens.
const FIRST_PART: usize = 512;

/// Services that take turns by conversation.
pub struct Replicas {
    services: Vec<Service>,
    metrics: Arc<Metrics>,
    places: Mutex<Places>,
}

/// Which conversation is where, by the hash of what names it.
#[derive(Default)]
struct Places {
    by_name: HashMap<u64, (usize, u64)>,
    clock: u64,
}

impl Replicas {
    /// One service for each engine, of which there is at least one; all have the same model.
    ///
    /// # Errors
    /// If the system gives no threads.
    pub fn start(engines: Vec<Engine>, settings: &ServiceSettings) -> std::io::Result<Replicas> {
        let metrics = Arc::new(Metrics::new());
        let start = |engine| Service::start_with(engine, settings.clone(), Arc::clone(&metrics));
        let services: Vec<Service> = engines.into_iter().map(start).collect::<std::io::Result<_>>()?;
        if services.is_empty() {
            return Err(std::io::Error::other("no engine to serve with"));
        }
        Ok(Replicas { services, metrics, places: Mutex::default() })
    }

    /// Where a turn belongs: where its conversation was before, if that still works, else where the least is going on.
    fn place(&self, request: &TurnRequest) -> usize {
        if self.services.len() == 1 {
            return 0;
        }
        let name = name_of(request);
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.clock += 1;
        let now = places.clock;
        let works = |index: usize| self.services[index].readiness() == Readiness::Ready;
        let known = places.by_name.get(&name).map(|(index, _)| *index).filter(|index| works(*index));
        let index = known.unwrap_or_else(|| {
            let all = 0..self.services.len();
            all.min_by_key(|index| (!works(*index), self.services[*index].in_progress())).unwrap_or(0)
        });
        places.by_name.insert(name, (index, now));
        if places.by_name.len() > MOST_PLACES {
            let half = now - (MOST_PLACES / 2) as u64;
            places.by_name.retain(|_, (_, used)| *used > half);
        }
        index
    }
}

/// What a client calls the conversation, else how it begins.
fn name_of(request: &TurnRequest) -> u64 {
    let mut hasher = DefaultHasher::new();
    match (&request.affinity, &request.input) {
        (Some(name), _) => name.hash(&mut hasher),
        (None, Input::Chat(chat)) => {
            let messages = chat.messages.as_array().into_iter().flatten().take(FIRST_MESSAGES);
            messages.for_each(|message| message.to_string().hash(&mut hasher));
        }
        (None, Input::Text(text)) => text.as_bytes()[..FIRST_PART.min(text.len())].hash(&mut hasher),
        (None, Input::Tokens(ids)) => ids[..FIRST_PART.min(ids.len())].hash(&mut hasher),
    }
    hasher.finish()
}

impl Turns for Replicas {
    fn start(&self, request: TurnRequest) -> Starting<'_> {
        self.services[self.place(&request)].start(request)
    }

    fn model(&self) -> &ModelInfo {
        self.services[0].model()
    }

    fn text(&self) -> &Arc<TextModel> {
        self.services[0].text()
    }

    /// Ready as long as one is.
    fn readiness(&self) -> Readiness {
        let all = self.services.iter().map(Turns::readiness);
        all.min_by_key(|readiness| *readiness != Readiness::Ready).unwrap_or(Readiness::Draining)
    }

    fn drain(&self) {
        self.services.iter().for_each(Turns::drain);
    }

    fn in_progress(&self) -> usize {
        self.services.iter().map(Turns::in_progress).sum()
    }

    fn stop(&self) {
        self.drain();
        std::thread::scope(|scope| {
            for service in &self.services {
                scope.spawn(|| service.stop());
            }
        });
    }

    fn written(&self, token: TokenAt) {
        self.metrics.written(token);
    }

    fn metrics(&self) -> String {
        self.metrics.text(&self.services.iter().map(Service::status).fold(EngineStatus::default(), EngineStatus::and))
    }
}
