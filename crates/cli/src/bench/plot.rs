//! Tokens per second against context, as an SVG image.

use lily_svg::plot::{Panel, Plot, Point, Series};

use super::measure::Start;
use super::record::Record;
use super::stat::Stat;

/// A panel for decode and one for prefill. `records` has at least one, ascending by context.
pub fn svg(records: &[Record]) -> String {
    let first = &records[0];
    let (cpu, cores) = (&first.machine.cpu, first.machine.cores);
    let model = format!("{}, {}", first.model, first.device);
    let machine = format!("{cpu}, {cores} cores; {}, contract {}", first.engine, first.contract);
    let decode = series(records, |record| Some(&record.decode_tok_s));
    let prefill = series(records, |record| record.prefill_tok_s.as_ref());
    let panels = [Panel { title: "decode tok/s", series: &decode }, Panel { title: "prefill tok/s", series: &prefill }];
    lily_svg::plot::svg(&Plot { heading: [&model, &machine], panels: &panels })
}

fn series(records: &[Record], speed: impl Fn(&Record) -> Option<&Stat>) -> [Series<'static>; 1] {
    let point = |record: &Record| {
        let Stat { median, min, max, .. } = *speed(record)?;
        Some(Point { context: record.context, median, min, max, synthetic: record.start == Start::Synthetic })
    };
    [Series { name: "lily", points: records.iter().filter_map(point).collect() }]
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::example;
    use super::*;

    #[test]
    fn the_image_has_a_point_per_number_and_says_what_was_measured() {
        let records = [example(256, Some(150.0), 61.0), example(512, Some(140.0), 60.0), example(131_072, None, 20.0)];
        let image = svg(&records);
        let document = roxmltree::Document::parse(&image).unwrap();
        assert_eq!(document.descendants().filter(|node| node.has_tag_name("circle")).count(), 5);
        let says = |part| document.descendants().any(|node| node.text().is_some_and(|text| text.contains(part)));
        assert!(says("A <CPU> & more") && says("tiny, cpu (2 threads, portable)") && says("contract 1"), "{image}");
    }
}
