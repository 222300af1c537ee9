//! `lily eval needle`: a sentence in a long context, found again by a question about it.

use std::num::NonZeroUsize;
use std::str::FromStr;
use std::sync::Arc;

use clap::Args;
use lily_backend::conformance::cases::Generator;
use serde::Serialize;
use serde_json::{Value, json};

use super::Common;
use super::ask::Asker;
use super::record::Results;
use crate::args::ModelArgs;
use crate::bench::contract::Contexts;
use crate::checkpoint;
use crate::exit::Usage;
use crate::output::{grouped, progress};

/// Arguments of `lily eval needle`.
#[derive(Args)]
pub struct NeedleArgs {
    /// Tokens of the prompts; `256..131072` doubles.
    #[arg(long, value_name = "LIST", default_value = "256..2048")]
    contexts: Contexts,
    /// Where the sentence stands, in percent of the context.
    #[arg(long, value_name = "LIST", default_value = "0,25,50,75,100")]
    depths: Depths,
    /// Prompts of each context and depth, each with another sentence.
    #[arg(long, value_name = "N", default_value = "10")]
    trials: NonZeroUsize,
    /// Seed of the sentences and of what is around them.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    common: Common,
}

/// Depths in percent, ascending, each once.
#[derive(Clone, Debug, PartialEq)]
struct Depths(Vec<usize>);

impl FromStr for Depths {
    type Err = Usage;

    fn from_str(text: &str) -> Result<Depths, Usage> {
        let depth = |part: &str| match part.trim().parse() {
            Ok(depth) if depth <= 100 => Ok(depth),
            _ => Err(Usage(format!("{part:?} is not a depth: expected percent, 0 to 100"))),
        };
        let mut all = text.split(',').map(depth).collect::<Result<Vec<usize>, Usage>>()?;
        all.sort_unstable();
        all.dedup();
        Ok(Depths(all))
    }
}

/// What the context is filled with: sentences that say nowhere where somebody lives.
const FILLER: [&str; 16] = [
    "The sun was warm that day.",
    "A soft wind came over the fields.",
    "The bird sang its song in the morning.",
    "It rained a little in the evening.",
    "The children played with a ball.",
    "Somebody had baked fresh bread.",
    "The stars were bright that night.",
    "A cart rolled slowly along the road.",
    "The leaves were red and yellow.",
    "There was a smell of apples.",
    "An old dog slept in the shade.",
    "The bells rang at noon.",
    "A small boat was on its way.",
    "The grass was still wet.",
    "Everybody waited for the summer.",
    "The cat washed its paws.",
];
const NAMES: [&str; 8] = ["Ralph", "Otis", "Bill", "Chester", "Holly", "Fiona", "Ada", "Nora"];
const PLACES: [&str; 8] = ["mill", "castle", "garden", "valley", "forest", "village", "meadow", "orchard"];

/// Enough for a sentence. An answer counts if the place is in it.
const ANSWER_TOKENS: usize = 48;

/// One context and depth.
#[derive(Debug, Serialize)]
struct Cell {
    context: usize,
    depth: usize,
    trials: usize,
    found: usize,
}

#[derive(Serialize)]
struct Outcome {
    seed: u64,
    cells: Vec<Cell>,
}

/// Runs the command.
pub fn needle(args: &NeedleArgs) -> anyhow::Result<()> {
    let mut results = Results::open(&args.common)?;
    let (contexts, depths) = (&args.contexts.0, &args.depths.0);
    let checkpoint = Arc::new(checkpoint::open(args.common.model.model.as_deref())?);
    let longest = contexts.last().copied().unwrap_or(0) + ANSWER_TOKENS;
    let model = ModelArgs { ctx: Some(args.common.model.ctx.unwrap_or(longest)), ..args.common.model.clone() };
    let mut asker = Asker::load(&model, &checkpoint)?;
    let bar = progress("answering", "prompts");
    bar.set_length((contexts.len() * depths.len() * args.trials.get()) as u64);
    let mut random = Generator::new(args.seed);
    let mut cells = Vec::new();
    for &context in contexts {
        for &depth in depths {
            let mut cell = Cell { context, depth, trials: args.trials.get(), found: 0 };
            for _ in 0..cell.trials {
                let story = Story::new(&mut random);
                let prompt = asker.prompt(&story.filled(&asker, context, depth)?, &Value::Null, false)?;
                let answer = asker.answer(&prompt, &Value::Null, ANSWER_TOKENS)?;
                cell.found += usize::from(answer.reply.content.contains(story.place));
                bar.inc(1);
            }
            cells.push(cell);
        }
    }
    bar.finish_and_clear();
    print(&asker.device(), depths, &cells);
    let outcome = Outcome { seed: args.seed, cells };
    results.append("needle", &args.common, &checkpoint, &asker.device(), &outcome)
}

/// A sentence to find, and the order of what is around it.
struct Story {
    name: &'static str,
    place: &'static str,
    filler: Vec<&'static str>,
}

impl Story {
    fn new(random: &mut Generator) -> Story {
        let mut choose = |from: &[&'static str]| from[random.ids(1, from.len())[0] as usize];
        let (name, place) = (choose(&NAMES), choose(&PLACES));
        // A few sentences in another order each time; repeated, they fill any context.
        Story { name, place, filler: (0..64).map(|_| choose(&FILLER)).collect() }
    }

    /// The conversation with so many sentences around the one.
    fn messages(&self, sentences: usize, depth: usize) -> Value {
        let before = sentences * depth / 100;
        let Story { name, place, .. } = self;
        let needle = format!("{name} lived in a {place}.");
        let mut all: Vec<&str> = self.filler.iter().copied().cycle().take(sentences).collect();
        all.insert(before, &needle);
        let text = all.join(" ");
        json!([{"role": "user", "content": format!("Here is a story.\n\n{text}\n\nQuestion: Where did {name} live?")}])
    }

    /// The conversation that fills `context` tokens as far as whole sentences do.
    fn filled(&self, asker: &Asker, context: usize, depth: usize) -> anyhow::Result<Value> {
        let tokens = |sentences| {
            let prompt = asker.prompt(&self.messages(sentences, depth), &Value::Null, false)?;
            anyhow::Ok(prompt.ids.len())
        };
        let least = tokens(0)?;
        if least > context {
            let (context, least) = (grouped(context), grouped(least));
            return Err(
                Usage(format!("a context of {context} tokens: expected {least} or more, the question alone")).into()
            );
        }
        // The longest that fits, between one that does and one that does not: every sentence has a token.
        let (mut fits, mut beyond) = (0, context);
        while beyond - fits > 1 {
            let middle = (fits + beyond) / 2;
            if tokens(middle)? <= context { fits = middle } else { beyond = middle }
        }
        Ok(self.messages(fits, depth))
    }
}

fn print(device: &str, depths: &[usize], cells: &[Cell]) {
    println!("{device}\n");
    println!("found, of {} each; chance is 1 of {}\n", cells.first().map_or(0, |cell| cell.trials), PLACES.len());
    let head: String = depths.iter().map(|depth| format!("{:>8}", format!("{depth} %"))).collect();
    println!("{:>9}{head}", "context");
    for row in cells.chunk_by(|a, b| a.context == b.context) {
        let found: String = row.iter().map(|cell| format!("{:>8}", cell.found)).collect();
        println!("{:>9}{found}", grouped(row.first().map_or(0, |cell| cell.context)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentence_stands_once_at_its_depth() {
        let story = Story::new(&mut Generator::new(3));
        let needle = format!("{} lived in a {}.", story.name, story.place);
        for (depth, before) in [(0, 0), (25, 25), (50, 50), (100, 100)] {
            let messages = story.messages(100, depth);
            let text = messages[0]["content"].as_str().unwrap();
            let (head, tail) = text.split_once(&needle).unwrap();
            assert_eq!((head.matches('.').count(), tail.matches('.').count()), (1 + before, 100 - before));
            assert!(!tail.contains(story.place), "the answer stands elsewhere, too");
        }
    }

    #[test]
    fn nothing_around_the_sentence_names_a_place_or_a_person() {
        for sentence in FILLER {
            let known = NAMES.iter().chain(&PLACES).find(|word| sentence.contains(**word));
            assert_eq!(known, None, "{sentence}");
        }
    }

    #[test]
    fn depths_are_percent() {
        assert_eq!("100, 0,50,0".parse::<Depths>().unwrap(), Depths(vec![0, 50, 100]));
        for wrong in ["", "101", "-1", "x", "1,,2"] {
            assert!(wrong.parse::<Depths>().is_err(), "{wrong:?}");
        }
    }
}
