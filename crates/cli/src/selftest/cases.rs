//! What a device has to compute, and what the reference computed.

use lily_backend::conformance::cases::Generator;
use lily_backend::{Backend, Input, Row, RowOutput, Step, Want};
use lily_model::{Checkpoint, Shape};
use lily_reference::{Logits, Reference, ops};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::checkpoint;

/// Context that a device is loaded with: more than any case or law takes.
pub const CONTEXT: usize = 512;

/// Tokens fed in steps; compared are the logits after each.
pub struct Case {
    pub name: &'static str,
    model: Model,
    /// Tokens of each step. A step may be more than a device takes at once: then it is fed in pieces.
    steps: &'static [usize],
}

/// Whose weights.
enum Model {
    /// The demo checkpoint's.
    Demo,
    /// Random ones in the sizes of the full model, of four layers, few experts and a small vocabulary: the kernels that the
    /// full model runs on.
    Full,
}

/// One token, a few, borders of tiles and chunks, a prompt and decoding after it.
pub const CASES: &[Case] = &[
    Case { name: "demo, one token", model: Model::Demo, steps: &[1] },
    Case { name: "demo, 7 tokens one by one", model: Model::Demo, steps: &[1, 1, 1, 1, 1, 1, 1] },
    Case { name: "demo, 9 tokens", model: Model::Demo, steps: &[9] },
    Case { name: "demo, 65 tokens, then 2", model: Model::Demo, steps: &[65, 1, 1] },
    Case { name: "demo, 64 tokens, 200 more, then 2", model: Model::Demo, steps: &[64, 200, 1, 1] },
    Case { name: "full-size layers, 2 tokens one by one", model: Model::Full, steps: &[1, 1] },
    Case { name: "full-size layers, 20 tokens, then 1", model: Model::Full, steps: &[20, 1] },
];

const FULL: Shape = Shape { layers: 4, vocab: 512, experts: 16, ..Shape::QWEN36 };

/// Shapes whose kernels are compiled, with names.
pub fn shapes() -> [(&'static str, Shape); 2] {
    [("demo", Shape::DEMO), ("full size", Shape::QWEN36)]
}

impl Case {
    /// Its weights.
    pub fn checkpoint(&self) -> anyhow::Result<Checkpoint> {
        match self.model {
            Model::Demo => checkpoint::demo(),
            Model::Full => Ok(Checkpoint::load(lily_synth::in_memory("full-size layers", &FULL, 1)?)?),
        }
    }

    /// Ids of each step.
    fn ids(&self, shape: &Shape) -> Vec<Vec<u32>> {
        let mut ids = Generator::new(17);
        self.steps.iter().map(|count| ids.ids(*count, shape.vocab)).collect()
    }

    /// Logits after each step on a device, `[steps, vocab]`.
    pub fn run(&self, device: &mut dyn Backend, shape: &Shape) -> anyhow::Result<Vec<f32>> {
        let state = device.new_state(self.steps.iter().sum())?;
        let (mut all, most) = (Vec::new(), device.caps().max_chunk);
        for ids in self.ids(shape) {
            let mut pieces = ids.chunks(most).peekable();
            while let Some(piece) = pieces.next() {
                let want = if pieces.peek().is_some() { Want::Nothing } else { Want::LastLogits };
                let row = Row { state, input: Input::Tokens(piece.to_vec()), want };
                let ticket = device.submit(Step { rows: vec![row], trace: false })?;
                if let Some(RowOutput::Logits(logits)) = device.wait(ticket)?.rows.pop() {
                    all.extend(logits);
                }
            }
        }
        Ok(all)
    }

    /// The same by the reference.
    fn reference(&self) -> anyhow::Result<Vec<f32>> {
        let checkpoint = self.checkpoint()?;
        let reference = Reference::new(&checkpoint);
        let mut state = reference.new_state();
        let ids = self.ids(&checkpoint.config.shape);
        Ok(ids.iter().flat_map(|ids| reference.forward(&mut state, ids, Logits::Last)).collect())
    }
}

/// The reference's outputs, written by `lily selftest --record`.
pub struct Recorded(SafeTensors<'static>);

static RECORDED: &[u8] = include_bytes!("../../../../assets/selftest/logits.safetensors");

impl Recorded {
    pub fn open() -> anyhow::Result<Recorded> {
        Ok(Recorded(SafeTensors::deserialize(RECORDED)?))
    }

    /// Logits of a case, `[steps, vocab]`.
    pub fn logits(&self, name: &str) -> anyhow::Result<Vec<f32>> {
        let tensor = self.0.tensor(name)?;
        Ok(tensor.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}

/// Computes what is recorded.
pub fn record() -> anyhow::Result<Vec<u8>> {
    let mut outputs = Vec::new();
    for case in CASES {
        let logits = case.reference()?;
        let shape = vec![case.steps.len(), logits.len() / case.steps.len()];
        outputs.push((case.name, shape, logits.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()));
    }
    let views =
        outputs.iter().map(|(name, shape, bytes)| Ok((*name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)));
    Ok(safetensors::serialize(views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?, None)?)
}

/// How far outputs are apart.
pub struct Comparison {
    /// Largest difference, relative to the largest logit of its step or 1.
    pub worst: f32,
    /// A highest logit that is another, by a margin that the budget does not explain.
    pub wrong_choice: Option<String>,
}

impl Comparison {
    pub fn new(got: &[f32], expected: &[f32], vocab: usize, budget: f32) -> anyhow::Result<Comparison> {
        anyhow::ensure!(got.len() == expected.len(), "{} logits came, {} are recorded", got.len(), expected.len());
        let (mut worst, mut wrong_choice) = (0f32, None);
        for (step, (got, expected)) in got.chunks_exact(vocab).zip(expected.chunks_exact(vocab)).enumerate() {
            let largest = expected.iter().fold(1f32, |largest, x| largest.max(x.abs()));
            let differences = got.iter().zip(expected).map(|(a, b)| (a - b).abs() / largest);
            // NaN is further away than anything.
            worst = differences.fold(worst, |worst, x| if x.is_nan() { f32::INFINITY } else { worst.max(x) });
            let order = ops::falling(expected);
            let (chosen, best) = (ops::greedy(got), order[0]);
            if chosen != best && expected[best] - expected[chosen] > 2.0 * budget * largest {
                wrong_choice = Some(format!("token {chosen} in place of {best} after step {step}"));
            }
        }
        Ok(Comparison { worst, wrong_choice })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_recorded_is_what_the_reference_computes() {
        let recorded = Recorded::open().unwrap();
        for case in CASES {
            // Only the sums of other machines' exponentials may differ.
            let shape = case.checkpoint().unwrap().config.shape;
            let (got, expected) = (case.reference().unwrap(), recorded.logits(case.name).unwrap());
            let Comparison { worst, wrong_choice } = Comparison::new(&got, &expected, shape.vocab, 1e-5).unwrap();
            assert!(worst <= 1e-5 && wrong_choice.is_none(), "{}: off by {worst:e}, record it again", case.name);
        }
    }

    #[test]
    fn another_choice_is_wrong_unless_it_was_close() {
        let compare = |got: &[f32], budget| Comparison::new(got, &[4.0, 3.9, 1.0, 0.0], 4, budget).unwrap();
        assert!(compare(&[3.9, 4.0, 1.0, 0.0], 0.03).wrong_choice.is_none());
        let Comparison { worst, wrong_choice } = compare(&[1.0, 3.9, 4.0, 0.0], 0.03);
        assert!(wrong_choice.is_some() && worst == 0.75);
        assert_eq!(compare(&[f32::NAN, 3.9, 1.0, 0.0], 0.03).worst, f32::INFINITY);
        assert!(Comparison::new(&[1.0], &[1.0, 2.0], 1, 0.1).is_err());
    }
}
