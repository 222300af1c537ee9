//! The page: a chapter for each device, a part in it for each model.

use std::fmt::Write as _;

use lily_svg::plot::{Panel, Plot, Point, Series};

use super::records::{Record, Records, Start, Stat};

/// What `lily bench` prints as its contract; numbers of a run have names in braces.
const CONTRACT: &str = include_str!("../../../crates/cli/src/bench/contract.txt");

/// What the page says before the first number.
const HEAD: &str = "\
# Benchmarks

`cargo xtask report` writes this page from the [records](../bench/results/README.md); edit those, not the page. What the numbers mean
for the engine, and what was tried, is in the notes on the [CPU](../bench/notes/cpu.md), the [GPU](../bench/notes/cuda.md) and the
[server](../bench/notes/server.md).

## How to read it

- Of several records of one engine on one device with one model, type of KV cache, number of sessions and context, the newest counts.
  Those that it replaces are listed as older ones; their files stay.
- Numbers are medians over rounds, with lowest and highest where there were several. A hollow point in a plot, and \"synthetic\" in a
  table, stand for a context whose cache was filled with noise instead of a prefill.
- \"of a read\" is what a decode step moves, by its shape, as a share of what a plain read of the weights reaches on the same threads or
  GPU in the same round.
- Memory is the highest that the process had resident, mapped weights included; on a GPU that is the memory beside it.
- Engines \"in turns\" were measured on one machine in one go, each after the other, and compare well. Other pairs are of different
  hours, between which shared machines differ.
- Random weights take the same kernels over the same bytes as trained ones.
- A commit that ends in `-dirty` had changes beside it.

## The contract

What `lily bench` measures; it prints this with the numbers of a run in place of the names in braces.

";

/// The page and its plots by name of file.
pub struct Page {
    pub text: String,
    pub plots: Vec<(String, String)>,
}

/// Records of one model on one device.
struct Part<'a> {
    place: String,
    weights: String,
    newest: Vec<&'a Record>,
}

/// Makes the page; plots lie in the directory `plots` beside it, their names begin with `prefix`.
pub fn make(records: &Records, plots: &str, prefix: &str) -> Page {
    let parts = parts(records);
    let mut page = Page { text: head(records, &parts), plots: Vec::new() };
    let mut chapter = "";
    for part in &parts {
        if part.place != chapter {
            chapter = &part.place;
            let _ = write!(page.text, "\n## {chapter}\n");
        }
        let _ = write!(page.text, "\n### {}\n\n", part.weights);
        let name = format!("{prefix}{}.svg", slug(&format!("{} {}", part.place, part.weights.replace(',', ""))));
        if let Some(plot) = plot(part) {
            let _ = writeln!(page.text, "![Tokens per second against context: {}]({plots}/{name})\n", part.place);
            page.plots.push((name, plot));
        }
        page.text += &speeds(part);
        page.text += &peers(records, part);
        page.text += &commands(records, part);
        page.text += &history(records, part);
    }
    page
}

/// Parts in the order of the page: GPUs before CPUs, larger models before smaller ones.
fn parts(records: &Records) -> Vec<Part<'_>> {
    let mut parts: Vec<Part<'_>> = Vec::new();
    for record in records.newest() {
        let (place, weights) = (record.place(), record.weights());
        match parts.iter_mut().find(|part| part.place == place && part.weights == weights) {
            Some(part) => part.newest.push(record),
            None => parts.push(Part { place, weights, newest: vec![record] }),
        }
    }
    for part in &mut parts {
        part.newest.sort_by_key(|record| (record.kv.clone(), record.sessions, record.context));
    }
    let order = |part: &Part<'_>| {
        let first = part.newest[0];
        let size = (first.shape.layers, first.shape.vocab);
        (first.device_parts().0 == "cpu", part.place.clone(), std::cmp::Reverse(size), part.weights.clone())
    };
    parts.sort_by_key(order);
    parts
}

fn head(records: &Records, parts: &[Part<'_>]) -> String {
    let mut text = HEAD.to_owned();
    for line in CONTRACT.lines() {
        let _ = writeln!(text, "    {line}");
    }
    if parts.is_empty() {
        text.push_str("\nThere are no records yet.\n");
    }
    if !records.others.is_empty() {
        let files: Vec<String> =
            records.others.iter().map(|file| format!("[{file}](../bench/results/{file})")).collect();
        let _ = write!(text, "\nRecords of other kinds, not shown here: {}.\n", files.join(", "));
    }
    text
}

/// lily's numbers.
fn speeds(part: &Part<'_>) -> String {
    let ours: Vec<&Record> = part.newest.iter().copied().filter(|record| record.is_ours()).collect();
    if ours.is_empty() {
        return String::new();
    }
    let several = ours.iter().any(|record| record.sessions > 1);
    let loaded = ours.iter().any(|record| record.load_s.is_some());
    let mut head = vec!["context"];
    head.extend(several.then_some("sessions"));
    head.extend(["prefill tok/s", "decode tok/s", "GB/s, of a read", "memory, GB"]);
    head.extend(loaded.then_some("load, s"));
    head.extend(["KV cache", "commit", "measured"]);
    let rows = ours.iter().map(|record| {
        let mut row = vec![grouped(record.context as u64)];
        row.extend(several.then(|| record.sessions.to_string()));
        row.extend([prefill(record), stat(&record.decode_tok_s), bandwidth(record), memory(record)]);
        row.extend(loaded.then(|| record.load_s.map_or_else(none, |seconds| format!("{seconds:.2}"))));
        row.extend([record.kv.to_uppercase(), commit(record), minute(&record.date)]);
        row
    });
    let table = table(&head, rows);
    let devices = distinct(ours.iter().map(|record| {
        let (kind, how) = record.device_parts();
        format!("`{kind}`: {how}; {}, {} cores", record.machine.cpu, record.machine.cores)
    }));
    let contracts = distinct(ours.iter().filter_map(|record| Some(record.contract?.to_string())));
    format!("{}; contract {}.\n\n{table}", devices.join("; "), contracts.join(", "))
}

/// Each peer beside us.
fn peers(records: &Records, part: &Part<'_>) -> String {
    let peers: Vec<&Record> = part.newest.iter().copied().filter(|record| !record.is_ours()).collect();
    let mut text = String::new();
    for engine in distinct(peers.iter().map(|record| record.engine.clone())) {
        let head = ["context", "", "lily", &engine, "ratio", "lily's commit", "in turns", "measured"];
        let mut rows = Vec::new();
        for peer in peers.iter().filter(|record| record.engine == engine) {
            let turns = records.in_turns(peer);
            let same =
                |ours: &&&Record| ours.is_ours() && (ours.context, ours.sessions) == (peer.context, peer.sessions);
            let Some(ours) = turns.or(part.newest.iter().find(same).copied()) else { continue };
            let measured = match turns {
                Some(_) => minute(&peer.date),
                None => format!("{}; {}", minute(&ours.date), minute(&peer.date)),
            };
            let tail = [commit(ours), if turns.is_some() { "yes" } else { "no" }.to_owned(), measured];
            let pairs = [
                ("prefill", &ours.prefill_tok_s, &peer.prefill_tok_s),
                ("decode", &ours.decode_tok_s, &peer.decode_tok_s),
            ];
            for (name, a, b) in pairs {
                let (Some(left), Some(right)) = (a, b) else { continue };
                let ratio = format!("{:.2}", left.median / right.median);
                let row = [grouped(peer.context as u64), name.into(), stat(a), stat(b), ratio];
                rows.push([&row[..], &tail[..]].concat());
            }
        }
        // The highest memory of a run is that of all its contexts: the last one's line has it.
        let mut last = peers.iter().rev().filter(|record| record.engine == engine);
        let pair = last.find_map(|peer| Some((records.in_turns(peer)?, peer)));
        if let Some((ours, peer)) = pair
            && let (Some(a), Some(b)) = (ours.peak_memory_bytes, peer.peak_memory_bytes)
        {
            let ratio = format!("{:.2}", a as f64 / b as f64);
            let row = ["".into(), "memory, GB".into(), memory(ours), memory(peer), ratio];
            rows.push([&row[..], &[commit(ours), "yes".into(), minute(&peer.date)]].concat());
        }
        if !rows.is_empty() {
            let kv =
                distinct(peers.iter().filter(|record| record.engine == engine).map(|record| record.kv.to_uppercase()));
            // The form in which `bench-peers` writes its weights, the nearest to lily's.
            let weights = if engine.starts_with("llama.cpp") { "weights in Q4_0, " } else { "" };
            let _ = write!(text, "\nBeside {engine}, {weights}KV cache in {}:\n\n", kv.join(", "));
            text += &table(&head, rows);
        }
    }
    text
}

/// What to type for these numbers.
fn commands(records: &Records, part: &Part<'_>) -> String {
    let ours = part.newest.iter().filter(|record| record.is_ours());
    let commands = distinct(ours.map(|record| command(records, record)));
    if commands.is_empty() {
        return String::new();
    }
    let mut text =
        String::from("\nThe commands, on such a machine; the speeds that it gives on another are its own:\n\n");
    for command in commands {
        let _ = writeln!(text, "    {}", command.replace('\n', "\n    "));
    }
    let files = distinct(part.newest.iter().map(|record| record.file.clone()));
    let files: Vec<String> = files.iter().map(|file| format!("[{file}](../bench/results/{file})")).collect();
    let _ = write!(text, "\nRecords: {}.\n", files.join(", "));
    text
}

/// The command that makes the run of a record, from what the run recorded.
fn command(records: &Records, record: &Record) -> String {
    let run: Vec<&Record> = records.of_run(record.run).collect();
    let stats = run.iter().flat_map(|r| [&r.prefill_tok_s, &r.decode_tok_s]).flatten();
    let rounds = stats.map(|stat| stat.rounds.len()).max().unwrap_or(0);
    let paired = |peer: &Record| !peer.is_ours() && records.in_turns(peer).is_some_and(|ours| ours.run == record.run);
    let (layers, vocab) = (record.shape.layers, record.shape.vocab);
    let threads = match record.device_parts().0 == "cpu" && record.threads != record.machine.cores {
        true => format!(" --threads {}", record.threads),
        false => String::new(),
    };
    if records.all.iter().any(paired) {
        // Turns of some runs at full size, of one run on a cut.
        let full = (layers, vocab) == (lily_model::Shape::QWEN36.layers, lily_model::Shape::QWEN36.vocab);
        let (shape, rounds) = match full {
            true => ("--full".to_owned(), rounds / 2),
            false => (format!("--layers {layers} --vocab {vocab}"), rounds),
        };
        return format!("cargo xtask bench-peers cpu {shape} --rounds {rounds}{threads}");
    }
    let contexts: Vec<String> = run.iter().map(|record| record.context.to_string()).collect();
    let (made, model) = match record.model.strip_prefix("synthetic ") {
        Some(shape) => (String::new(), format!("--synthetic {shape}")),
        None if record.model.starts_with("qwen36-") => {
            let made = format!("cargo xtask synth --out {} --layers {layers} --vocab {vocab}\n", record.model);
            (made, format!("--model {}", record.model))
        }
        None if record.model == "demo" => (String::new(), "--synthetic demo".into()),
        None => (String::new(), format!("--model {}", record.model)),
    };
    let sessions = if record.sessions > 1 { format!(" --sessions {}", record.sessions) } else { String::new() };
    format!(
        "{made}lily bench {model} --backend {} --kv {} --contexts {} --decode {} --rounds {rounds}{sessions}{threads}",
        record.device_parts().0,
        record.kv,
        contexts.join(","),
        record.decode_tokens,
    )
}

/// What newer records replaced.
fn history(records: &Records, part: &Part<'_>) -> String {
    let is_newest = |record: &Record| part.newest.iter().any(|newest| std::ptr::eq(*newest, record));
    let here = |record: &&Record| record.place() == part.place && record.weights() == part.weights;
    let mut older: Vec<&Record> = records.all.iter().filter(here).filter(|record| !is_newest(record)).collect();
    if older.is_empty() {
        return String::new();
    }
    older.sort_by(|a, b| (a.sessions, a.context).cmp(&(b.sessions, b.context)).then(b.date.cmp(&a.date)));
    let head = ["context", "sessions", "engine", "prefill tok/s", "decode tok/s", "commit", "measured"];
    let rows = older.iter().map(|record| {
        let counts = [grouped(record.context as u64), record.sessions.to_string(), record.engine.clone()];
        let speeds = [prefill(record), stat(&record.decode_tok_s), commit(record), minute(&record.date)];
        [&counts[..], &speeds[..]].concat()
    });
    let table = table(&head, rows);
    format!("\n<details><summary>Older records: {}</summary>\n\n{table}\n</details>\n", older.len())
}

/// Speeds of one session with the first type of KV cache that there is; `None` without numbers.
fn plot(part: &Part<'_>) -> Option<String> {
    let alone: Vec<&Record> = part.newest.iter().copied().filter(|record| record.sessions == 1).collect();
    let kv = &alone.iter().find(|record| record.is_ours())?.kv;
    let engines = distinct(alone.iter().map(|record| record.engine_name().to_owned()));
    let mut engines: Vec<&str> = engines.iter().map(String::as_str).collect();
    engines.sort_by_key(|engine| *engine != "lily");
    let series = |speed: fn(&Record) -> &Option<Stat>| {
        let of = |engine: &&'_ str| {
            let mine = alone.iter().filter(|r| r.engine_name() == *engine && (!r.is_ours() || r.kv == *kv));
            let point = |record: &&Record| {
                let Stat { median, min, max, .. } = *speed(record).as_ref()?;
                let synthetic = record.start == Start::Synthetic;
                Some(Point { context: record.context, median, min, max, synthetic })
            };
            mine.filter_map(point).collect::<Vec<Point>>()
        };
        engines.iter().map(|engine| Series { name: engine, points: of(engine) }).collect::<Vec<_>>()
    };
    let (decode, prefill) = (series(|record| &record.decode_tok_s), series(|record| &record.prefill_tok_s));
    let panels = [Panel { title: "decode tok/s", series: &decode }, Panel { title: "prefill tok/s", series: &prefill }];
    let when = distinct(alone.iter().map(|record| day(&record.date).to_owned()));
    let commits = distinct(alone.iter().filter_map(|record| record.commit.clone()));
    let measured = format!("measured {}; lily at {}", when.join(", "), commits.join(", "));
    let what = format!("{}. {}", part.place, part.weights);
    Some(lily_svg::plot::svg(&Plot { heading: [&what, &measured], panels: &panels }))
}

fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let names: Vec<String> = head.iter().map(|&name| name.to_owned()).collect();
    let rule: Vec<String> = head.iter().map(|_| "---".to_owned()).collect();
    let rows: String = rows.into_iter().map(|row| line(&row)).collect();
    format!("{}{}{rows}", line(&names), line(&rule))
}

fn prefill(record: &Record) -> String {
    if record.start == Start::Synthetic { "synthetic".into() } else { stat(&record.prefill_tok_s) }
}

/// `median (lowest to highest)`.
fn stat(stat: &Option<Stat>) -> String {
    match stat {
        None => none(),
        Some(stat) if stat.rounds.len() < 2 => number(stat.median),
        Some(stat) => format!("{} ({} to {})", number(stat.median), number(stat.min), number(stat.max)),
    }
}

/// Bytes that decoding moved, by the shape, and its share of a plain read. Sessions share the weights that are read, so the
/// share of several says nothing.
fn bandwidth(record: &Record) -> String {
    match (&record.token_bytes, &record.decode_tok_s, &record.read_share, record.sessions) {
        (Some(bytes), Some(decode), Some(share), 1) => {
            let moved = bytes.total() as f64 * decode.median / 1e9;
            format!("{}, {:.0} %", number(moved), 100.0 * share.median)
        }
        _ => none(),
    }
}

fn memory(record: &Record) -> String {
    record.peak_memory_bytes.map_or_else(none, |bytes| format!("{:.2}", bytes as f64 / 1e9))
}

fn commit(record: &Record) -> String {
    record.commit.as_deref().map_or_else(none, |commit| format!("`{commit}`"))
}

fn none() -> String {
    "-".into()
}

/// Three digits, or all before the point.
fn number(x: f64) -> String {
    match x {
        x if x < 10.0 => format!("{x:.2}"),
        x if x < 100.0 => format!("{x:.1}"),
        x => grouped(x.round() as u64),
    }
}

/// Digits in threes.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let from_end = |(i, digit): (usize, char)| {
        let comma = i > 0 && (digits.len() - i).is_multiple_of(3);
        [comma.then_some(','), Some(digit)]
    };
    digits.chars().enumerate().flat_map(from_end).flatten().collect()
}

/// Of an RFC 3339 time.
fn day(date: &str) -> &str {
    date.split('T').next().unwrap_or_default()
}

/// The same up to the minute.
fn minute(date: &str) -> String {
    date.get(..16).unwrap_or(date).replace('T', " ")
}

/// Each once, in the order of first appearance.
fn distinct(all: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut seen: Vec<String> = Vec::new();
    for one in all {
        if !seen.contains(&one) {
            seen.push(one);
        }
    }
    seen
}

/// Letters and digits, with single dashes between.
fn slug(text: &str) -> String {
    let lower = text.to_lowercase();
    let words: Vec<&str> = lower.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
    words.join("-")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::records::tests::line;
    use super::*;

    fn page(lines: &[Value]) -> Page {
        let mut records = Records::default();
        let text: Vec<String> = lines.iter().map(|fields| line(fields.clone())).collect();
        records.add("a.jsonl", &text.join("\n")).unwrap();
        make(&records, "images", "bench-")
    }

    fn speed(median: f64) -> Value {
        json!({"median": median, "min": median, "max": median, "rounds": [median]})
    }

    #[test]
    fn every_number_stands_with_its_commit_date_and_command() {
        let page = page(&[
            json!({"decode_tok_s": speed(50.0)}),
            json!({"context": 1024, "start": "synthetic", "prefill_tok_s": null}),
        ]);
        for part in [
            "## A, 2 cores\n\n### Random weights: 4 layers, vocabulary 4,096\n",
            "| 64 | 10.0 (9.00 to 11.0) | 50.0 | 50.0, 1000 % | 2.00 | BF16 | `abc` | 2026-01-02 00:00 |\n",
            "| 1,024 | synthetic | 10.0 (9.00 to 11.0) |",
            "    lily bench --synthetic qwen36:4 --backend cpu --kv bf16 --contexts 64,1024 --decode 8 --rounds 3\n",
            "    prompt     token i of session s",
        ] {
            assert!(page.text.contains(part), "no {part:?} in {}", page.text);
        }
        let (name, plot) = &page.plots[0];
        assert!(page.text.contains(&format!("(images/{name})")) && plot.matches("<circle").count() == 3, "{plot}");
    }

    #[test]
    fn a_peer_is_set_against_what_was_measured_in_turns_with_it() {
        let peer = json!({"engine": "llama.cpp b1", "commit": null, "contract": null, "kv": "f16", "device": "cpu",
            "decode_tok_s": speed(5.0), "prefill_tok_s": null, "token_bytes": null, "read_share": null});
        let newer = json!({"date": "2026-01-03T00:00:00Z", "commit": "newer", "decode_tok_s": speed(100.0)});
        let page = page(&[json!({"decode_tok_s": speed(20.0)}), peer, newer]);
        assert!(
            page.text.contains("| 64 | decode | 20.0 | 5.00 | 4.00 | `abc` | yes | 2026-01-02 00:00 |"),
            "{}",
            page.text
        );
        assert!(page.text.contains("| 64 | 10.0 (9.00 to 11.0) | 100 | 100, 1000 % |"), "{}", page.text);
        assert!(page.text.contains("Older records: 1<"), "{}", page.text);
    }

    #[test]
    fn sessions_together_are_not_drawn_and_claim_no_share() {
        let page = page(&[json!({}), json!({"sessions": 16, "decode_tok_s": speed(99.0)})]);
        assert!(page.text.contains("| 64 | 16 | 10.0 (9.00 to 11.0) | 99.0 | - |"), "{}", page.text);
        assert_eq!(page.plots[0].1.matches("<circle").count(), 2);
        assert!(page.text.contains("--sessions 16"));
    }

    #[test]
    fn no_records_still_make_a_page() {
        let page = make(&Records::default(), "images", "bench-");
        assert!(page.text.contains("no records yet") && page.plots.is_empty());
    }

    #[test]
    fn digits_stand_in_threes() {
        assert_eq!(
            [0, 12, 999, 1000, 131_072, 1_000_000].map(grouped),
            ["0", "12", "999", "1,000", "131,072", "1,000,000"]
        );
        assert_eq!([9.999, 99.94, 803.9, 31_353.87].map(number), ["10.00", "99.9", "804", "31,354"]);
    }
}
