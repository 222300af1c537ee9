//! Numbers against context, in panels beside each other.

use std::fmt::Write as _;

use crate::escaped;

const HEIGHT: f64 = 376.0;
/// Of one panel's axes.
const PANEL: (f64, f64) = (380.0, 240.0);
/// Left of the axes, where the numbers stand; and from one panel to the next.
const MARGIN: f64 = 60.0;
const STRIDE: f64 = 460.0;
const TOP: f64 = 70.0;
/// Colours of series on a light and on a dark page, for any kind of colour vision; a series beyond them begins anew.
const COLOURS: [(&str, &str); 4] =
    [("#2563a8", "#6cb0f5"), ("#b4530a", "#f0a35e"), ("#3f7d3c", "#7ccf78"), ("#7a4aa0", "#c39be8")];

/// A picture.
pub struct Plot<'a> {
    /// What was measured, and where: a line each.
    pub heading: [&'a str; 2],
    pub panels: &'a [Panel<'a>],
}

/// One quantity against context.
pub struct Panel<'a> {
    /// The quantity with its unit.
    pub title: &'a str,
    pub series: &'a [Series<'a>],
}

/// Points that belong together.
pub struct Series<'a> {
    pub name: &'a str,
    /// Ascending by context.
    pub points: Vec<Point>,
}

/// One number over rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Tokens; at least 1.
    pub context: usize,
    pub median: f64,
    pub min: f64,
    pub max: f64,
    /// Drawn hollow: the context was not computed.
    pub synthetic: bool,
}

/// Points are medians, bars span lowest to highest. Names of series are written if a panel has several. Panels without a point
/// are left out; an empty picture has the heading only.
pub fn svg(plot: &Plot<'_>) -> String {
    let panels: Vec<&Panel<'_>> =
        plot.panels.iter().filter(|panel| panel.series.iter().any(|series| !series.points.is_empty())).collect();
    let width = STRIDE * panels.len().max(1) as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<style>{}</style>\n<rect width=\"100%\" height=\"100%\" class=\"page\"/>\n",
        style()
    );
    for (y, line) in [24.0, 42.0].into_iter().zip(plot.heading) {
        text(&mut out, (MARGIN, y), "start", line);
    }
    for (i, panel) in panels.into_iter().enumerate() {
        draw(&mut out, MARGIN + STRIDE * i as f64, panel);
    }
    out.push_str("</svg>\n");
    out
}

fn style() -> String {
    let series = |dark: bool| {
        let colours = COLOURS.iter().map(|(light, night)| if dark { night } else { light });
        colours.enumerate().fold(String::new(), |mut all, (i, colour)| {
            let _ = write!(all, ".s{i}{{stroke:{colour}}}.f{i}{{fill:{colour};stroke:{colour}}}");
            all
        })
    };
    format!(
        ".page,.hollow{{fill:#fff}}text{{fill:#222}}.grid{{stroke:#ddd}}polyline{{fill:none}}{}\
         @media(prefers-color-scheme:dark){{.page,.hollow{{fill:#15181d}}text{{fill:#ddd}}.grid{{stroke:#3a3f47}}{}}}",
        series(false),
        series(true)
    )
}

fn draw(out: &mut String, left: f64, panel: &Panel<'_>) {
    let (width, height) = PANEL;
    let points = || panel.series.iter().flat_map(|series| &series.points);
    let highest = points().map(|point| point.max).fold(0.0, f64::max);
    let step = step_for(highest);
    let steps = (highest / step).ceil().max(1.0);
    let mut contexts: Vec<usize> = points().map(|point| point.context).collect();
    contexts.sort_unstable();
    contexts.dedup();
    // Half a doubling of room on both sides.
    let (low, high) = (log2(contexts[0]) - 0.5, log2(contexts[contexts.len() - 1]) + 0.5);
    let x = |context: usize| left + width * (log2(context) - low) / (high - low);
    let y = |speed: f64| TOP + height * (1.0 - speed / (steps * step));
    text(out, (left, TOP - 8.0), "start", panel.title);
    for i in 0..=steps as usize {
        let speed = i as f64 * step;
        line(out, (left, y(speed)), (left + width, y(speed)), "grid");
        text(out, (left - 6.0, y(speed) + 4.0), "end", &format!("{speed}"));
    }
    for &context in &contexts {
        text(out, (x(context), TOP + height + 18.0), "middle", &short(context));
    }
    text(out, (left + width / 2.0, TOP + height + 38.0), "middle", "context, tokens");
    for (i, series) in panel.series.iter().enumerate() {
        let colour = i % COLOURS.len();
        let path: Vec<String> =
            series.points.iter().map(|point| format!("{:.1},{:.1}", x(point.context), y(point.median))).collect();
        let _ = writeln!(out, "<polyline class=\"s{colour}\" points=\"{}\"/>", path.join(" "));
        for point in &series.points {
            let (cx, cy) = (x(point.context), y(point.median));
            line(out, (cx, y(point.min)), (cx, y(point.max)), &format!("s{colour}"));
            let class = if point.synthetic { format!("hollow s{colour}") } else { format!("f{colour}") };
            let _ = writeln!(out, "<circle cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"3.5\" class=\"{class}\"/>");
        }
        if panel.series.len() > 1 {
            let (from, y) = (left + 130.0 * i as f64, TOP + height + 56.0);
            line(out, (from, y - 4.0), (from + 18.0, y - 4.0), &format!("s{colour}"));
            text(out, (from + 24.0, y), "start", series.name);
        }
    }
}

fn line(out: &mut String, from: (f64, f64), to: (f64, f64), class: &str) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ = writeln!(out, "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" class=\"{class}\"/>");
}

fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, content: &str) {
    let content = escaped(content);
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
    use super::*;

    fn series(name: &'static str, points: &[(usize, f64)]) -> Series<'static> {
        let points = points.iter().map(|&(context, median)| Point {
            context,
            median,
            min: 0.9 * median,
            max: 1.2 * median,
            synthetic: context > 100_000,
        });
        Series { name, points: points.collect() }
    }

    #[test]
    fn the_image_is_well_formed_and_has_a_point_per_number() {
        let decode = [series("lily", &[(256, 61.0), (512, 60.0), (131_072, 20.0)]), series("<peer>", &[(512, 75.0)])];
        let prefill = [series("lily", &[(256, 150.0)]), series("<peer>", &[])];
        let panels = [Panel { title: "decode", series: &decode }, Panel { title: "prefill", series: &prefill }];
        let image = svg(&Plot { heading: ["a model", "A <CPU> & \"more\""], panels: &panels });
        let document = roxmltree::Document::parse(&image).unwrap();
        let with_tag = |name| document.descendants().filter(move |node| node.has_tag_name(name));
        assert_eq!(with_tag("circle").count(), 5);
        assert_eq!(with_tag("circle").filter(|circle| circle.attribute("class") == Some("hollow s0")).count(), 1);
        let inside = |circle: roxmltree::Node<'_, '_>| {
            let y: f64 = circle.attribute("cy").unwrap().parse().unwrap();
            (TOP..=TOP + PANEL.1).contains(&y)
        };
        assert!(with_tag("circle").all(inside), "{image}");
        // Names are escaped, not dropped.
        for shown in ["128K", "A <CPU> & \"more\"", "<peer>"] {
            assert!(with_tag("text").any(|text| text.text() == Some(shown)), "{shown}");
        }
    }

    #[test]
    fn panels_without_a_point_take_no_room() {
        let [decode, none] = [[series("lily", &[(131_072, 20.0)])], [series("lily", &[])]];
        let panels = [Panel { title: "prefill", series: &none }, Panel { title: "decode", series: &decode }];
        let width = |panels| {
            let image = svg(&Plot { heading: ["", ""], panels });
            let document = roxmltree::Document::parse(&image).unwrap();
            document.root_element().attribute("viewBox").unwrap().split(' ').nth(2).unwrap().to_owned()
        };
        assert_eq!(width(&panels), width(&panels[1..]));
        assert_eq!(width(&panels), width(&[]));
    }

    #[test]
    fn steps_are_round_and_few() {
        for (top, step) in [(61.0, 20.0), (9.9, 2.0), (10.0, 2.0), (150.0, 50.0), (0.03, 0.01), (1000.0, 200.0)] {
            assert!((step_for(top) / step - 1.0).abs() < 1e-9, "{top}: {}", step_for(top));
        }
        assert_eq!(step_for(0.0), 1.0);
    }
}
