//! Tokens per second against context, as an SVG image.

use std::fmt::Write as _;

use super::measure::Start;
use super::record::Record;
use super::stat::Stat;

const WIDTH: f64 = 920.0;
const HEIGHT: f64 = 360.0;
/// Of one panel's axes.
const PANEL: (f64, f64) = (380.0, 240.0);
const LEFT: [f64; 2] = [60.0, 520.0];
const TOP: f64 = 70.0;
const COLOUR: &str = "#2563a8";

/// A panel for decode and one for prefill. Points are medians, bars span lowest to highest, hollow points had a synthetic
/// start. `records` has at least one, ascending by context.
pub fn svg(records: &[Record]) -> String {
    let first = &records[0];
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    text(&mut out, (LEFT[0], 24.0), "start", &format!("{}, {}", first.model, first.device));
    let machine =
        format!("{}, {} cores; {}, contract {}", first.machine.cpu, first.machine.cores, first.engine, first.contract);
    text(&mut out, (LEFT[0], 42.0), "start", &machine);
    let contexts: Vec<usize> = records.iter().map(|record| record.context).collect();
    let decode: Vec<Point<'_>> = records.iter().map(|r| (r.context, &r.decode_tok_s, r.start)).collect();
    let prefill: Vec<Point<'_>> =
        records.iter().filter_map(|r| Some((r.context, r.prefill_tok_s.as_ref()?, r.start))).collect();
    panel(&mut out, LEFT[0], "decode tok/s", &contexts, &decode);
    panel(&mut out, LEFT[1], "prefill tok/s", &contexts, &prefill);
    out.push_str("</svg>\n");
    out
}

/// Context, speed, start.
type Point<'a> = (usize, &'a Stat, Start);

fn panel(out: &mut String, left: f64, title: &str, contexts: &[usize], points: &[Point<'_>]) {
    let (width, height) = PANEL;
    let step = step_for(points.iter().map(|(_, stat, _)| stat.max).fold(0.0, f64::max));
    let steps = points.iter().map(|(_, stat, _)| (stat.max / step).ceil()).fold(1.0, f64::max);
    // Half a doubling of room on both sides.
    let (low, high) = (log2(contexts[0]) - 0.5, log2(contexts[contexts.len() - 1]) + 0.5);
    let x = |context: usize| left + width * (log2(context) - low) / (high - low);
    let y = |speed: f64| TOP + height * (1.0 - speed / (steps * step));
    text(out, (left, TOP - 8.0), "start", title);
    for i in 0..=steps as usize {
        let speed = i as f64 * step;
        line(out, (left, y(speed)), (left + width, y(speed)), "#ddd");
        text(out, (left - 6.0, y(speed) + 4.0), "end", &format!("{speed}"));
    }
    for &context in contexts {
        text(out, (x(context), TOP + height + 18.0), "middle", &short(context));
    }
    text(out, (left + width / 2.0, TOP + height + 38.0), "middle", "context, tokens");
    let path: Vec<String> = points.iter().map(|(c, stat, _)| format!("{:.1},{:.1}", x(*c), y(stat.median))).collect();
    let _ = writeln!(out, "<polyline fill=\"none\" stroke=\"{COLOUR}\" points=\"{}\"/>", path.join(" "));
    for (context, stat, start) in points {
        line(out, (x(*context), y(stat.min)), (x(*context), y(stat.max)), COLOUR);
        let fill = if *start == Start::Synthetic { "white" } else { COLOUR };
        let (cx, cy) = (x(*context), y(stat.median));
        let _ = writeln!(out, "<circle cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"3.5\" fill=\"{fill}\" stroke=\"{COLOUR}\"/>");
    }
}

fn line(out: &mut String, from: (f64, f64), to: (f64, f64), colour: &str) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ = writeln!(out, "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>");
}

fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, content: &str) {
    let content = content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>");
}

/// 1, 2 or 5 times a power of ten, so that three to eight steps reach `top`.
fn step_for(top: f64) -> f64 {
    if top <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf((top / 3.0).log10().floor());
    [5.0, 2.0].into_iter().map(|factor| factor * power).find(|step| top / step >= 3.0).unwrap_or(power)
}

fn log2(context: usize) -> f64 {
    (context as f64).log2()
}

/// 131072 as `128K`.
fn short(context: usize) -> String {
    if context.is_multiple_of(1024) { format!("{}K", context / 1024) } else { context.to_string() }
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::example;
    use super::*;

    #[test]
    fn the_image_is_well_formed_and_has_a_point_per_number() {
        let records = [example(256, Some(150.0), 61.0), example(512, Some(140.0), 60.0), example(131_072, None, 20.0)];
        for records in [&records[..], &records[2..]] {
            let image = svg(records);
            let document = roxmltree::Document::parse(&image).unwrap();
            let numbers = records.len() + records.iter().filter(|r| r.prefill_tok_s.is_some()).count();
            let circles: Vec<_> = document.descendants().filter(|node| node.has_tag_name("circle")).collect();
            assert_eq!(circles.len(), numbers);
            let inside = |circle: &roxmltree::Node<'_, '_>| {
                let y: f64 = circle.attribute("cy").unwrap().parse().unwrap();
                (TOP..=TOP + PANEL.1).contains(&y)
            };
            assert!(circles.iter().all(inside), "{image}");
            assert!(document.descendants().any(|node| node.text() == Some("128K")));
            // Names are escaped, not dropped.
            assert!(document.descendants().any(|node| node.text().is_some_and(|t| t.contains("A <CPU> & more"))));
        }
    }

    #[test]
    fn steps_are_round_and_few() {
        for (top, step) in [(61.0, 20.0), (9.9, 2.0), (10.0, 2.0), (150.0, 50.0), (0.03, 0.01), (1000.0, 200.0)] {
            assert!((step_for(top) / step - 1.0).abs() < 1e-9, "{top}: {}", step_for(top));
        }
        assert_eq!(step_for(0.0), 1.0);
    }
}
