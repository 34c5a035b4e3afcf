//! The experiment as an SVG drawing, after the paper's figure 9: ΔL over the gap, a line of medians and a band of quartiles
//! for each cut.

use std::fmt::Write as _;

use super::Point;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 110.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 54.0;

/// Okabe and Ito's colours, which people with any colour vision can tell apart; used again after the last.
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"];

/// The drawing, a whole SVG file. `points` of one cut lie together, their gaps rising, as
/// [`Experiment::run`](super::Experiment::run) gives them.
pub fn svg(points: &[Point], title: &str) -> String {
    let gaps = points.iter().map(|point| point.actual_gap.0);
    let extras = points.iter().flat_map(|point| [point.extra.lower, point.extra.upper]);
    let frame = Frame { x: Axis::over(gaps), y: Axis::over(extras) };
    let mut out = String::new();
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
         height=\"{HEIGHT}\" font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"#1f2430\">\n\
         <title>{0}</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"26\" font-size=\"15\" font-weight=\"600\">{0}</text>",
        escaped(title)
    );
    frame.draw(&mut out);
    for (i, curve) in points.chunk_by(|a, b| a.cut == b.cut).enumerate() {
        frame.curve(&mut out, i, curve);
    }
    out.push_str("</svg>\n");
    out
}

/// A range with round steps.
struct Axis {
    low: f64,
    high: f64,
    step: f64,
}

impl Axis {
    /// Reaches from 0, or below, beyond the largest value.
    fn over(values: impl Iterator<Item = f64>) -> Self {
        let ends = |(low, high): (f64, f64), value: f64| (low.min(value), high.max(value));
        let (low, high) = values.filter(|value| value.is_finite()).fold((0.0, 0.0), ends);
        let rough = ((high - low) / 7.0).max(1e-3);
        let magnitude = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0].into_iter().map(|by| by * magnitude).find(|step| *step >= rough);
        let step = step.unwrap_or(10.0 * magnitude);
        // A gap of 25 ms may have come out as 25.01: that is no reason for a further step.
        let (low, high) = ((low / step).floor() * step, (high / step - 0.01).ceil() * step);
        Self { low, high: high.max(low + step), step }
    }

    fn share(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let count = ((self.high - self.low) / self.step).round() as u32;
        (0..=count).map(|i| self.low + f64::from(i) * self.step)
    }

    /// A tick's text, with the decimals that its step needs.
    fn label(&self, tick: f64) -> String {
        let decimals = (-self.step.log10().floor()).max(0.0) as usize;
        // Adding 0 takes the sign off a negative zero.
        format!("{:.decimals$}", (tick / self.step).round() * self.step + 0.0)
    }
}

struct Frame {
    x: Axis,
    y: Axis,
}

impl Frame {
    fn x(&self, gap: f64) -> f64 {
        LEFT + self.x.share(gap) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, extra: f64) -> f64 {
        HEIGHT - BOTTOM - self.y.share(extra) * (HEIGHT - TOP - BOTTOM)
    }

    fn draw(&self, out: &mut String) {
        let (left, right) = (self.x(self.x.low), self.x(self.x.high));
        let (low, high) = (self.y(self.y.low), self.y(self.y.high));
        for tick in self.y.ticks() {
            let y = self.y(tick);
            line(
                out,
                (left, y),
                (right, y),
                if tick.abs() < self.y.step / 2.0 { "#8a93a0" } else { "#e4e7eb" },
            );
            text(out, (left - 8.0, y + 4.0), "end", &self.y.label(tick));
        }
        for tick in self.x.ticks() {
            let x = self.x(tick);
            line(out, (x, low), (x, low + 5.0), "#8a93a0");
            text(out, (x, low + 20.0), "middle", &self.x.label(tick));
        }
        line(out, (left, low), (left, high), "#8a93a0");
        text(out, ((left + right) / 2.0, HEIGHT - 12.0), "middle", "gap before each call (ms)");
        let _ = writeln!(
            out,
            "<text transform=\"translate(16 {:.1}) rotate(-90)\" text-anchor=\"middle\">extra time per token (ms)</text>",
            (low + high) / 2.0
        );
    }

    fn curve(&self, out: &mut String, index: usize, curve: &[Point]) {
        let colour = COLOURS[index % COLOURS.len()];
        let at =
            |point: &Point, extra: f64| format!("{:.1},{:.1}", self.x(point.actual_gap.0), self.y(extra));
        let lower = curve.iter().map(|point| at(point, point.extra.lower));
        let upper = curve.iter().rev().map(|point| at(point, point.extra.upper));
        let band: Vec<String> = lower.chain(upper).collect();
        let middle: Vec<String> = curve.iter().map(|point| at(point, point.extra.median)).collect();
        let _ = write!(
            out,
            "<polygon points=\"{}\" fill=\"{colour}\" fill-opacity=\"0.15\"/>\n\
             <polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\n",
            band.join(" "),
            middle.join(" ")
        );
        let (x, y) = (WIDTH - RIGHT + 18.0, TOP + 10.0 + 20.0 * index as f64);
        line(out, (x, y), (x + 18.0, y), colour);
        let cut = curve.first().map_or(0, |point| point.cut);
        text(out, (x + 25.0, y + 4.0), "start", &format!("cut {cut}"));
    }
}

fn line(out: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64), colour: &str) {
    let _ = writeln!(
        out,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{colour}\"/>"
    );
}

fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, what: &str) {
    let _ =
        writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escaped(what));
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use cluster::Millis;
    use roxmltree::Document;

    use super::*;
    use crate::statistics::Quartiles;

    fn point(cut: u32, gap: f64, extra: f64) -> Point {
        let extra = Quartiles { lower: extra - 0.1, median: extra, upper: extra + 0.2 };
        Point { cut, gap: Millis(gap), actual_gap: Millis(gap), per_token: extra, extra }
    }

    fn numbers(text: &str) -> Vec<f64> {
        text.split([' ', ',']).map(|number| number.parse().unwrap()).collect()
    }

    #[test]
    fn a_drawing_is_well_formed_and_has_a_line_and_a_band_for_each_cut_inside_its_frame() {
        let points = [point(5, 0.0, 0.0), point(5, 25.0, 2.5), point(15, 0.0, -0.3), point(15, 25.0, 1.0)];
        let drawing = svg(&points, "A <model> & \"its\" gaps");
        let document = Document::parse(&drawing).unwrap();
        let root = document.root_element();
        assert_eq!(root.tag_name().name(), "svg");
        let named = |name: &'static str| root.children().filter(move |node| node.tag_name().name() == name);
        assert_eq!(named("title").next().unwrap().text(), Some("A <model> & \"its\" gaps"));
        assert_eq!((named("polyline").count(), named("polygon").count()), (2, 2));
        for shape in named("polyline").chain(named("polygon")) {
            let numbers = numbers(shape.attribute("points").unwrap());
            assert!(numbers.chunks(2).all(|at| (LEFT..=WIDTH - RIGHT).contains(&at[0])), "{numbers:?}");
            assert!(numbers.chunks(2).all(|at| (TOP..=HEIGHT - BOTTOM).contains(&at[1])), "{numbers:?}");
        }
        let texts: Vec<&str> = named("text").filter_map(|node| node.text()).collect();
        assert!(texts.contains(&"cut 5") && texts.contains(&"cut 15"), "{texts:?}");
    }

    #[test]
    fn nothing_measured_and_nonsense_are_drawn_as_an_empty_frame() {
        for points in [vec![], vec![point(1, 0.0, f64::NAN)]] {
            let drawing = svg(&points, "nothing");
            let document = Document::parse(&drawing).unwrap();
            assert!(document.descendants().any(|node| node.text() == Some("gap before each call (ms)")));
        }
    }

    #[test]
    fn ticks_are_round_and_reach_over_all_values() {
        let labels = |values: &[f64]| {
            let axis = Axis::over(values.iter().copied());
            axis.ticks().map(|tick| axis.label(tick)).collect::<Vec<_>>()
        };
        assert_eq!(labels(&[0.0, 25.0]), ["0", "5", "10", "15", "20", "25"]);
        assert_eq!(labels(&[-0.1, 1.1]), ["-0.2", "0.0", "0.2", "0.4", "0.6", "0.8", "1.0", "1.2"]);
        assert_eq!(labels(&[]).first().map(String::as_str), Some("0.000"));
    }
}
