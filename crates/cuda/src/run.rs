//! Rows of a step on the device: which of them share a pass, which kernels run, as a graph or one by one, and what becomes of the
//! tokens they sample.

use std::collections::BTreeMap;
use std::sync::Arc;

use lily_backend::{Error, Result, RowOutput, SamplingParams, StageOutput, StateId, Ticket, Want};

use crate::device::{Graph, Pointer};
use crate::forward::{Forward, Trace};
use crate::kernels::rows::ROWS;
use crate::kernels::sample::SampleScratch;
use crate::kernels::{Kernels, Pass, Run};
use crate::plan::{DeviceWeights, Scratch};
use crate::state::Sampled;
use crate::step::{CheckedRow, Masked, RowResult, Sampling};
use crate::{CudaBackend, Live, RUNS};

/// The captured graphs.
pub(crate) struct Graphs {
    /// Up to the logits.
    forward: Graph,
    /// With the highest logit's token.
    greedy: Graph,
    /// With a token by all sampling parameters.
    sample: Graph,
    /// One token of each of several rows, up to the logits, by the number of rows. Made when they are first needed.
    rows: BTreeMap<usize, Graph>,
}

/// A row whose kernels are launched.
struct Launched {
    row: CheckedRow,
    /// What the device was told.
    run: Run,
    /// Position of the row's first token.
    position: usize,
    /// Whether its token is being sampled.
    sampled: bool,
    /// The logits that are wanted.
    logits: Vec<f32>,
    /// Where those of its last token lie.
    last: Pointer,
}

impl CudaBackend {
    pub(crate) fn take_slot(&mut self) -> usize {
        let slot = self.next_slot;
        self.next_slot = (slot + 1) % Run::RESULTS;
        slot
    }

    /// Puts a run on the device.
    pub(crate) fn upload_run(&mut self, run: &Run) -> Result<()> {
        self.upload_runs(self.scratch.run, std::slice::from_ref(run))
    }

    fn upload_runs(&mut self, to: Pointer, runs: &[Run]) -> Result<()> {
        self.live = None;
        if self.next_run + runs.len() > RUNS {
            self.next_run = 0;
        }
        let offset = self.next_run * size_of::<Run>();
        self.next_run += runs.len();
        for (i, run) in runs.iter().enumerate() {
            self.runs.write(offset + i * size_of::<Run>(), run.bytes());
        }
        self.device.upload_pinned(to, &self.runs, offset, size_of_val(runs))
    }

    fn upload_biases(&self, params: &SamplingParams) -> Result<u32> {
        let mut sums: BTreeMap<u32, f32> = BTreeMap::new();
        for (id, bias) in params.logit_bias.iter() {
            *sums.entry(*id).or_default() += bias;
        }
        let bytes: Vec<u8> = sums.iter().flat_map(|(id, x)| [id.to_le_bytes(), x.to_le_bytes()]).flatten().collect();
        self.device.upload(self.scratch.biases, &bytes)?;
        Ok(sums.len() as u32)
    }

    fn sample_scratch(&self) -> SampleScratch {
        sample_scratch(&self.scratch)
    }

    /// Applies what is kept of a state's updates; its run is on the device.
    pub(crate) fn apply_updates(&mut self, id: StateId) -> Result<()> {
        let state = self.state(id)?;
        if state.applied < state.position() {
            let pass = Pass { device: &self.device, overlap: false };
            let layers = self.checkpoint.config.shape.delta_layers();
            self.kernels.apply_updates(&pass, self.scratch.run, layers)?;
            let state = self.state_mut(id)?;
            state.applied = state.position();
        }
        Ok(())
    }

    /// Runs a row; what it samples is not waited for.
    pub(crate) fn run_row(
        &mut self,
        ticket: Ticket,
        index: usize,
        row: CheckedRow,
        trace: Option<&mut Vec<StageOutput>>,
    ) -> Result<RowResult> {
        let (id, tokens) = (row.state, row.len());
        let slot = self.take_slot() as u32;
        let state = self.state(id)?;
        let position = state.position();
        let mut run = Run { slot, ..state.run() };
        if let Want::Token(params) = &row.want {
            describe(params, &mut run);
        }
        let continues = match (&self.live, &row) {
            (Some(live), CheckedRow { ids: None, want: Want::Token(params), .. }) => {
                trace.is_none() && live.state == id && live.params == *params
            }
            _ => false,
        };
        if !continues {
            if let Want::Token(params) = &row.want {
                run.biases = self.upload_biases(params)?;
            }
            if let (Some(ids), true) = (&row.ids, tokens == 1) {
                run.token = ids[0];
            }
            self.upload_run(&run)?;
            self.apply_updates(id)?;
        }
        let vocab = self.caps.vocab;
        let mut logits = match row.want {
            Want::LastLogits => room_for(vocab)?,
            Want::AllLogits => room_for(tokens * vocab)?,
            _ => Vec::new(),
        };
        let sampled = self.launch_row(&row, &run, &mut logits, index, trace)?;
        let live = match &row.want {
            Want::Token(params) if sampled => Some(Live { state: id, params: params.clone() }),
            _ => None,
        };
        self.live = live;
        self.state_mut(id)?.applied = position + tokens;
        let last = self.scratch.logits;
        self.settle_row(ticket, index, Launched { row, run, position, sampled, logits, last })
    }

    /// Runs up to `ROWS` rows of one token each in one pass.
    pub(crate) fn run_rows(
        &mut self,
        ticket: Ticket,
        rows: Vec<(usize, CheckedRow)>,
    ) -> Result<Vec<(usize, RowResult)>> {
        let count = rows.len();
        let mut runs = Vec::with_capacity(count);
        for (_, row) in &rows {
            let slot = self.take_slot() as u32;
            let mut run = Run { slot, ..self.state(row.state)?.run() };
            if let Want::Token(params) = &row.want {
                describe(params, &mut run);
            }
            if let Some(ids) = &row.ids {
                run.token = ids[0];
            }
            runs.push(run);
        }
        self.upload_runs(self.scratch.runs, &runs)?;
        if !self.graphs.rows.contains_key(&count) {
            let pass = Pass { device: &self.device, overlap: self.device.overlaps() };
            let graph = self.device.capture(|| Forward { pass, ..self.forward() }.rows(count))?;
            self.graphs.rows.insert(count, graph);
        }
        self.device.run(&self.graphs.rows[&count])?;
        let pass = Pass { device: &self.device, overlap: false };
        let (s, results, vocab) = (&self.scratch, self.results.pointer, self.caps.vocab);
        if runs.iter().any(|run| run.greedy == 1) {
            let bests = (s.bests, self.kernels.rows_head_grid(&pass));
            self.kernels.pick_best(&pass, (s.runs, count), bests, results)?;
        }
        let mut done = Vec::with_capacity(count);
        for (at, ((index, row), mut run)) in rows.into_iter().zip(runs).enumerate() {
            let last = self.scratch.logits.at(4 * at * vocab);
            let mut logits = Vec::new();
            let mut sampled = false;
            match &row.want {
                Want::Nothing => {}
                Want::LastLogits | Want::AllLogits => {
                    logits = room_for(vocab)?;
                    self.device.download_floats(&mut logits, last)?;
                }
                Want::Token(params) if params.masked => {}
                Want::Token(params) => {
                    sampled = true;
                    if run.greedy == 0 {
                        run.biases = self.upload_biases(params)?;
                        self.upload_run(&run)?;
                        let pass = Pass { device: &self.device, overlap: false };
                        self.kernels.sample(&pass, self.scratch.run, last, &self.sample_scratch(), results)?;
                    }
                }
            }
            let position = run.position as usize;
            let result = self.settle_row(ticket, index, Launched { row, run, position, sampled, logits, last });
            done.push((index, result.unwrap_or_else(RowResult::Failed)));
        }
        Ok(done)
    }

    /// Advances the state of a row; what it samples is not waited for.
    fn settle_row(&mut self, ticket: Ticket, index: usize, launched: Launched) -> Result<RowResult> {
        let Launched { row, mut run, position, sampled, logits, last: last_logits } = launched;
        let (id, tokens, slot, vocab) = (row.state, row.len(), run.slot as usize, self.caps.vocab);
        let state = self.state_mut(id)?;
        state.advance(row.ids.as_deref());
        let last = position + tokens - 1;
        match row.want {
            Want::Nothing => Ok(RowResult::Done(RowOutput::Nothing)),
            Want::LastLogits | Want::AllLogits => {
                let first = last + 1 - logits.len() / vocab;
                let bad = logits.chunks_exact(vocab).position(|logits| !logits.iter().all(|x| x.is_finite()));
                Ok(match bad {
                    Some(bad) => RowResult::Failed(Error::BadLogits { row: index, position: first + bad }),
                    None => RowResult::Done(RowOutput::Logits(logits)),
                })
            }
            Want::Token(params) => {
                let report = match params.logprobs {
                    Some(top) => {
                        let mut logits = room_for(vocab)?;
                        self.device.download_floats(&mut logits, last_logits)?;
                        Some((logits, top))
                    }
                    None => None,
                };
                let sampling = Sampling { state: id, slot, position: last, report };
                if sampled {
                    self.state_mut(id)?.sampled = Sampled::Slot(slot);
                    return Ok(RowResult::Token(sampling));
                }
                let held = self.device.zeroed("logits that wait for a mask", 4 * vocab)?;
                self.device.copy(held.pointer(), last_logits, held.bytes())?;
                let state = self.state_mut(id)?;
                state.awaits_mask = Some(ticket);
                let words = Arc::clone(&state.words);
                run.position = last as u32;
                Ok(RowResult::Waiting(Box::new(Masked { sampling, params, run, logits: held, _words: words })))
            }
        }
    }

    /// Launches a row's kernels; tells whether they sample its token.
    fn launch_row(
        &mut self,
        row: &CheckedRow,
        run: &Run,
        logits: &mut [f32],
        index: usize,
        trace: Option<&mut Vec<StageOutput>>,
    ) -> Result<bool> {
        let tokens = row.len();
        let sampling = match &row.want {
            Want::Token(params) if !params.masked => Some(params),
            _ => None,
        };
        if tokens == 1 && trace.is_none() {
            let graph = match sampling {
                None => &self.graphs.forward,
                Some(params) if is_plain_greedy(params) => &self.graphs.greedy,
                Some(_) => &self.graphs.sample,
            };
            self.device.run(graph)?;
            self.device.download_floats(logits, self.scratch.logits)?;
            return Ok(sampling.is_some());
        }
        if let Some(ids) = &row.ids {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            self.device.upload(self.scratch.ids, &bytes)?;
        }
        let mut forward = self.forward();
        forward.trace = trace.is_some().then(|| Trace::new(Arc::clone(&self.checkpoint)));
        match tokens {
            1 => forward.one(Pointer::NULL)?,
            2..=ROWS => {
                forward.pass.overlap = self.device.overlaps();
                forward.few(tokens)?;
            }
            _ => forward.many(tokens)?,
        }
        let traced = forward.trace.take();
        // The run's token is the last one of the row from here on.
        let last = Run { position: run.position + tokens as u32 - 1, ..*run };
        self.upload_run(&last)?;
        let mut forward = self.forward();
        forward.trace = traced;
        match &row.want {
            Want::Nothing => {}
            Want::AllLogits if tokens > 1 => forward.all_logits(tokens, logits)?,
            Want::AllLogits | Want::LastLogits | Want::Token(_) => forward.head(tokens - 1)?,
        }
        if let (Some(trace), Some(recorded)) = (trace, forward.trace.take()) {
            let stages = recorded.stages.into_iter();
            trace.extend(stages.map(|(stage, values)| StageOutput { stage, row: index, values }));
        }
        if matches!(row.want, Want::LastLogits) || tokens == 1 {
            self.device.download_floats(logits, self.scratch.logits)?;
        }
        let Some(params) = sampling else { return Ok(false) };
        let pass = Pass { device: &self.device, overlap: false };
        let (k, s, results) = (&self.kernels, &self.scratch, self.results.pointer);
        if is_plain_greedy(params) {
            k.pick_best(&pass, (s.run, 1), (s.bests, k.head_grid(&pass)), results)?;
        } else {
            k.sample(&pass, s.run, s.logits, &self.sample_scratch(), results)?;
        }
        Ok(true)
    }

    /// A pass outside a graph.
    fn forward(&self) -> Forward<'_> {
        Forward {
            pass: Pass { device: &self.device, overlap: false },
            kernels: &self.kernels,
            weights: &self.weights,
            scratch: &self.scratch,
            trace: None,
        }
    }

    /// Samples a row whose mask is there.
    pub(crate) fn sample_masked(&mut self, ticket: Ticket, masked: Masked, mask: &[u32]) -> Result<RowResult> {
        let Masked { sampling, params, mut run, logits, .. } = masked;
        let waits = self.states.get(&sampling.state.0).is_some_and(|state| state.awaits_mask == Some(ticket));
        if !waits {
            // Reset, restored or freed meanwhile: the token is reported and not kept.
            run.sampled = self.scratch.spare;
        }
        let mut words = vec![0u32; self.kernels.sizes.vocab.div_ceil(32)];
        words.iter_mut().zip(mask).for_each(|(word, mask)| *word = *mask);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.device.upload(self.scratch.mask, &bytes)?;
        run.biases = self.upload_biases(&params)?;
        self.upload_run(&run)?;
        let pass = Pass { device: &self.device, overlap: false };
        let (s, results) = (&self.scratch, self.results.pointer);
        self.kernels.sample(&pass, s.run, logits.pointer(), &self.sample_scratch(), results)?;
        if let Some(state) = self.states.get_mut(&sampling.state.0).filter(|_| waits) {
            state.awaits_mask = None;
            state.sampled = Sampled::Slot(sampling.slot);
        }
        // Freed when the kernels have read it: freeing waits.
        drop(logits);
        Ok(RowResult::Token(sampling))
    }

    /// Takes a row's output, whose work is done.
    pub(crate) fn finish_row(&mut self, index: usize, row: RowResult) -> Result<RowOutput> {
        match row {
            RowResult::Done(output) => Ok(output),
            RowResult::Failed(error) => Err(error),
            RowResult::Waiting(_) => Err(Error::BadStep(format!("row {index} waits for its mask"))),
            RowResult::Token(sampling) => {
                let (id, status) = (self.results.word(2 * sampling.slot), self.results.word(2 * sampling.slot + 1));
                let output = sampling.output(index, id, status);
                // Tokens of any state may have come from this slot: forks of it, and itself.
                for state in self.states.values_mut() {
                    state.resolve(sampling.slot, id);
                }
                if output.is_err()
                    && let Some(state) = self.states.get_mut(&sampling.state.0)
                    && state.sampled == Sampled::Id(id)
                {
                    state.sampled = Sampled::Nothing;
                }
                output
            }
        }
    }
}

impl Graphs {
    pub(crate) fn capture(
        pass: &Pass<'_>,
        kernels: &Kernels,
        weights: &DeviceWeights,
        scratch: &Scratch,
        results: Pointer,
    ) -> Result<Graphs> {
        let forward = || -> Result<()> {
            let mut forward = Forward { pass: *pass, kernels, weights, scratch, trace: None };
            forward.one(Pointer::NULL)?;
            forward.head(0)
        };
        Ok(Graphs {
            forward: pass.device.capture(forward)?,
            greedy: pass.device.capture(|| {
                forward()?;
                kernels.pick_best(pass, (scratch.run, 1), (scratch.bests, kernels.head_grid(pass)), results)
            })?,
            sample: pass.device.capture(|| {
                forward()?;
                kernels.sample(pass, scratch.run, scratch.logits, &sample_scratch(scratch), results)
            })?,
            rows: BTreeMap::new(),
        })
    }
}

fn sample_scratch(s: &Scratch) -> SampleScratch {
    SampleScratch { scores: s.scores, counts: s.token_counts, sampler: s.sampler, biases: s.biases, mask: s.mask }
}

/// Writes sampling parameters into a run, but for the biases.
fn describe(params: &SamplingParams, run: &mut Run) {
    run.vocab_limit = params.vocab_limit;
    run.top_k = params.top_k;
    run.penalty_start = u32::try_from(params.penalty_start).unwrap_or(u32::MAX);
    run.masked = u32::from(params.masked);
    run.greedy = u32::from(is_plain_greedy(params));
    run.temperature = params.temperature;
    run.top_p = params.top_p;
    run.min_p = params.min_p;
    run.repetition = params.repetition_penalty;
    run.presence = params.presence_penalty;
    run.frequency = params.frequency_penalty;
    run.seed = params.seed;
}

/// Whether the raw logits decide alone.
fn is_plain_greedy(p: &SamplingParams) -> bool {
    let penalties = p.repetition_penalty != 1.0 || p.presence_penalty != 0.0 || p.frequency_penalty != 0.0;
    p.temperature == 0.0 && p.logit_bias.is_empty() && !p.masked && !penalties
}

/// Zeros, or the error that there is no memory for them.
fn room_for(len: usize) -> Result<Vec<f32>> {
    let mut room = Vec::new();
    let needed = len * size_of::<f32>();
    room.try_reserve_exact(len).map_err(|_| Error::OutOfMemory {
        what: "the logits of a row".into(),
        needed,
        available: 0,
    })?;
    room.resize(len, 0.0);
    Ok(room)
}
