//! The stages of a forward pass, for comparing backends: a pass is run from mark to mark, and memory is read between.

use lily_backend::{Part, Result, Stage};
use lily_model::Shape;

use crate::device::{Command, Gpu, Pass, Slice, read_words};

/// Where stages are to be read, if they are recorded: after how many commands, and what.
pub(crate) struct Marks(Option<Vec<(usize, Stage)>>);

/// Where the values of stages are found, for one token or many.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Views {
    /// `[tokens, hidden]` f32.
    pub(crate) stream: Slice,
    pub(crate) normed: Normed,
    /// `[tokens, experts + 1]` f32.
    pub(crate) router: Slice,
}

/// The normed stream.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Normed {
    /// Of one token, as `kernels::Stream` has it: still to be scaled.
    Gained { gained: Slice, squares: Slice },
    /// `[tokens, hidden]` f32.
    Rows(Slice),
}

impl Marks {
    pub(crate) fn new(trace: bool) -> Marks {
        Marks(trace.then(Vec::new))
    }

    /// What the pass has come to is the value of `stage`.
    pub(crate) fn add(&mut self, pass: &Pass, stage: Stage) {
        if let Some(marks) = &mut self.0 {
            marks.push((pass.commands.len(), stage));
        }
    }

    /// Runs a pass up to its marks, one by one, and reads the stage at each. What the mixer or the experts add is the stream
    /// after them minus the stream before. Leaves in the pass what follows the last mark.
    pub(crate) fn run(
        &mut self,
        gpu: &mut dyn Gpu,
        pass: &mut Pass,
        views: &Views,
        shape: &Shape,
    ) -> Result<Vec<(Stage, Vec<f32>)>> {
        let (mut commands, mut done) = (std::mem::take(pass).commands.into_iter(), 0);
        let mut before = Vec::new();
        let mut stages = Vec::new();
        for (end, stage) in self.0.iter_mut().flat_map(std::mem::take) {
            let next: Vec<Command> = commands.by_ref().take(end - done).collect();
            done = end;
            if !next.is_empty() {
                let commit = gpu.commit(next)?;
                gpu.wait(commit)?;
            }
            let read = |slice| read_words(gpu, slice, f32::from_le_bytes);
            let values = match stage.part {
                Part::Embedding | Part::Layer => read(views.stream)?,
                Part::MixerNorm | Part::MoeNorm | Part::FinalNorm => match views.normed {
                    Normed::Rows(rows) => read(rows)?,
                    Normed::Gained { gained, squares } => {
                        let scale = norm_scale(&read(squares)?, shape);
                        read(gained)?.iter().map(|x| x * scale).collect()
                    }
                },
                Part::Router => {
                    let logits = read(views.router)?;
                    logits.chunks_exact(shape.experts + 1).flat_map(|row| &row[..shape.experts]).copied().collect()
                }
                Part::Mixer | Part::Moe => {
                    let after = read(views.stream)?;
                    let change = after.iter().zip(&before).map(|(after, before)| after - before).collect();
                    before = after;
                    change
                }
            };
            if stage.part == Part::Embedding {
                before.clone_from(&values);
            }
            stages.push((stage, values));
        }
        pass.commands = commands.collect();
        Ok(stages)
    }
}

/// What kernels make of the partial sums of squares.
fn norm_scale(squares: &[f32], shape: &Shape) -> f32 {
    let mean = squares.iter().sum::<f32>() / shape.hidden as f32;
    (mean + shape.rms_eps).sqrt().recip()
}
