//! Line charts as SVG: what a measurement draws of its results.
//!
//! Pure: numbers in, text out. Knows nothing of what was measured.
#![forbid(unsafe_code)]

mod axis;

use std::fmt::Write as _;

use axis::Axis;

const WIDTH: f64 = 720.0;
/// Of one chart; several lie below each other.
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = 54.0;

/// Okabe and Ito's colours, which people with any colour vision can tell apart; used again after the last.
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"];

/// One chart.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// What it shows.
    pub title: String,
    /// What lies to the right, with its unit.
    pub x: String,
    /// What lies upwards, with its unit.
    pub y: String,
    /// Its lines.
    pub curves: Vec<Curve>,
}

/// A line.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// What it is, for the legend.
    pub name: String,
    /// Where it goes.
    pub points: Vec<Point>,
}

/// A place that a line goes through.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// To the right.
    pub x: f64,
    /// Upwards.
    pub y: f64,
    /// From where to where a band around the line reaches here.
    pub band: Option<(f64, f64)>,
}

impl From<(f64, f64)> for Point {
    fn from((x, y): (f64, f64)) -> Self {
        Self { x, y, band: None }
    }
}

/// Charts below each other, as a whole SVG file.
pub fn svg(charts: &[Chart]) -> String {
    let height = HEIGHT * charts.len() as f64;
    let title = charts.first().map_or("", |chart| chart.title.as_str());
    let mut out = String::new();
    let _ = writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"#1f2430\">\n\
         <title>{}</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>",
        escaped(title)
    );
    for (place, chart) in charts.iter().enumerate() {
        Frame::new(chart, HEIGHT * place as f64).draw(&mut out, chart);
    }
    out.push_str("</svg>\n");
    out
}

/// A text as XML has it.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Where a chart lies, and what its axes reach over.
struct Frame {
    x: Axis,
    y: Axis,
    /// Where its legend begins.
    right: f64,
    top: f64,
}

impl Frame {
    fn new(chart: &Chart, top: f64) -> Self {
        let points = || chart.curves.iter().flat_map(|curve| &curve.points);
        let upwards = |point: &Point| {
            let (lower, upper) = point.band.unwrap_or((point.y, point.y));
            [point.y, lower, upper]
        };
        let longest = chart.curves.iter().map(|curve| curve.name.chars().count()).max().unwrap_or(0);
        // Seven units are a wide letter of this size; a legend never takes more than half of the chart.
        let legend = (50.0 + 7.0 * longest as f64).clamp(110.0, WIDTH / 2.0);
        Self {
            x: Axis::over(points().map(|point| point.x)),
            y: Axis::over(points().flat_map(upwards)),
            right: WIDTH - legend,
            top,
        }
    }

    fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let height = HEIGHT - TOP - BOTTOM;
        (LEFT + self.x.share(x) * (self.right - LEFT), self.top + HEIGHT - BOTTOM - self.y.share(y) * height)
    }

    fn draw(&self, out: &mut String, chart: &Chart) {
        let _ = writeln!(
            out,
            "<text x=\"{LEFT}\" y=\"{}\" font-size=\"15\" font-weight=\"600\">{}</text>",
            self.top + 26.0,
            escaped(&chart.title)
        );
        self.axes(out, chart);
        for (place, curve) in chart.curves.iter().enumerate() {
            self.curve(out, place, curve);
        }
    }

    fn axes(&self, out: &mut String, chart: &Chart) {
        let ((left, low), (right, high)) =
            (self.at(self.x.low, self.y.low), self.at(self.x.high, self.y.high));
        for tick in self.y.ticks() {
            let y = self.at(self.x.low, tick).1;
            let colour = if tick.abs() < self.y.step / 2.0 { "#8a93a0" } else { "#e4e7eb" };
            line(out, (left, y), (right, y), colour);
            text(out, (left - 8.0, y + 4.0), "end", &self.y.label(tick));
        }
        for tick in self.x.ticks() {
            let x = self.at(tick, self.y.low).0;
            line(out, (x, low), (x, low + 5.0), "#8a93a0");
            text(out, (x, low + 20.0), "middle", &self.x.label(tick));
        }
        line(out, (left, low), (left, high), "#8a93a0");
        text(out, ((left + right) / 2.0, self.top + HEIGHT - 12.0), "middle", &chart.x);
        let _ = writeln!(
            out,
            "<text transform=\"translate(16 {:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            (low + high) / 2.0,
            escaped(&chart.y)
        );
    }

    fn curve(&self, out: &mut String, place: usize, curve: &Curve) {
        let colour = COLOURS[place % COLOURS.len()];
        let at = |x: f64, y: f64| {
            let (x, y) = self.at(x, y);
            format!("{x:.1},{y:.1}")
        };
        let bands = || curve.points.iter().filter_map(|point| Some((point.x, point.band?)));
        let lower = bands().map(|(x, (lower, _))| at(x, lower));
        let upper: Vec<String> = bands().map(|(x, (_, upper))| at(x, upper)).collect();
        let band: Vec<String> = lower.chain(upper.into_iter().rev()).collect();
        if !band.is_empty() {
            let _ = writeln!(
                out,
                "<polygon points=\"{}\" fill=\"{colour}\" fill-opacity=\"0.15\"/>",
                band.join(" ")
            );
        }
        let middle: Vec<String> = curve.points.iter().map(|point| at(point.x, point.y)).collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            middle.join(" ")
        );
        let (x, y) = (self.right + 18.0, self.top + TOP + 10.0 + 20.0 * place as f64);
        line(out, (x, y), (x + 18.0, y), colour);
        text(out, (x + 25.0, y + 4.0), "start", &curve.name);
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

#[cfg(test)]
mod tests {
    use roxmltree::{Document, Node};

    use super::*;

    fn point(x: f64, y: f64) -> Point {
        Point { x, y, band: Some((y - 0.1, y + 0.2)) }
    }

    fn chart(curves: &[(&str, &[Point])]) -> Chart {
        let curve =
            |&(name, points): &(&str, &[Point])| Curve { name: name.to_owned(), points: points.to_vec() };
        Chart {
            title: "A <model> & \"its\" gaps".to_owned(),
            x: "gap (ms)".to_owned(),
            y: "time (ms)".to_owned(),
            curves: curves.iter().map(curve).collect(),
        }
    }

    fn numbers(node: &Node) -> Vec<f64> {
        let points = node.attribute("points").unwrap();
        points
            .split([' ', ','])
            .filter(|part| !part.is_empty())
            .map(|number| number.parse().unwrap())
            .collect()
    }

    #[test]
    fn a_drawing_is_well_formed_and_has_a_line_and_a_band_for_each_curve_inside_its_frame() {
        let curves: [(&str, &[Point]); 2] = [
            ("cut 5", &[point(0.0, 0.0), point(25.0, 2.5)]),
            ("cut 15", &[point(0.0, -0.3), point(25.0, 1.0)]),
        ];
        let drawing = svg(&[chart(&curves)]);
        let document = Document::parse(&drawing).unwrap();
        let root = document.root_element();
        assert_eq!(root.tag_name().name(), "svg");
        let named = |name: &'static str| root.children().filter(move |node| node.tag_name().name() == name);
        assert_eq!(named("title").next().unwrap().text(), Some("A <model> & \"its\" gaps"));
        assert_eq!((named("polyline").count(), named("polygon").count()), (2, 2));
        for shape in named("polyline").chain(named("polygon")) {
            let numbers = numbers(&shape);
            assert_eq!(numbers.len(), if shape.tag_name().name() == "polygon" { 8 } else { 4 });
            assert!(numbers.chunks(2).all(|at| (LEFT..=WIDTH - 110.0).contains(&at[0])), "{numbers:?}");
            assert!(numbers.chunks(2).all(|at| (TOP..=HEIGHT - BOTTOM).contains(&at[1])), "{numbers:?}");
        }
        let texts: Vec<&str> = named("text").filter_map(|node| node.text()).collect();
        assert!(texts.contains(&"cut 5") && texts.contains(&"cut 15"), "{texts:?}");
    }

    #[test]
    fn charts_lie_below_each_other_and_lines_need_no_band() {
        let points = [Point::from((0.0, 1.0)), Point::from((2.0, 3.0))];
        let drawing = svg(&[chart(&[("a", &points)]), chart(&[("a server with a long name", &points)])]);
        let document = Document::parse(&drawing).unwrap();
        let lines: Vec<Vec<f64>> = document
            .descendants()
            .filter(|node| node.has_tag_name(("http://www.w3.org/2000/svg", "polyline")))
            .map(|node| numbers(&node))
            .collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0][1] + HEIGHT, lines[1][1]);
        assert!(lines[1][2] < lines[0][2], "the longer legend takes more room");
        assert!(!drawing.contains("polygon"));
    }

    #[test]
    fn nothing_measured_and_nonsense_are_drawn_as_an_empty_frame() {
        for points in [vec![], vec![point(1.0, f64::NAN)], vec![point(f64::INFINITY, 1.0)]] {
            let drawing = svg(&[chart(&[("nothing", &points)])]);
            let document = Document::parse(&drawing).unwrap();
            assert!(document.descendants().any(|node| node.text() == Some("gap (ms)")));
        }
    }
}
