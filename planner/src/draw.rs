//! A plan as an SVG drawing: one pipeline a line, a box for each stage as wide as its blocks, the CPU's share hatched
//! apart, links as arrows, the busiest stage outlined.

use std::fmt::Write as _;

use cluster::{LinkEncoding, Plan, ReplicaPlan, Role};

const LEFT: f64 = 150.0;
const RIGHT: f64 = 170.0;
const BLOCKS: f64 = 620.0;
const GAP: f64 = 26.0;
const ROW: f64 = 76.0;
const BOX: f64 = 40.0;
const TOP: f64 = 46.0;

/// The drawing, a whole SVG file.
pub fn svg(plan: &Plan, title: &str) -> String {
    let stages = plan.replicas.iter().map(|replica| replica.stages.len()).max().unwrap_or(1);
    let width = LEFT + BLOCKS + GAP * (stages as f64 - 1.0) + RIGHT;
    let idle = if plan.idle.is_empty() { 0.0 } else { 24.0 };
    let height = TOP + ROW * plan.replicas.len() as f64 + 34.0 + idle;
    let mut out = String::new();
    let _ = write!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         height=\"{height:.0}\" font-family=\"system-ui, sans-serif\" font-size=\"12\">\n\
         <title>{0}</title>\n\
         <defs><marker id=\"tip\" viewBox=\"0 0 8 8\" refX=\"7\" refY=\"4\" markerWidth=\"7\" markerHeight=\"7\" \
         orient=\"auto\"><path d=\"M0 0L8 4L0 8z\" fill=\"#5b6470\"/></marker></defs>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"14\" y=\"24\" font-size=\"15\" font-weight=\"600\" fill=\"#1f2430\">{0}</text>\n",
        escaped(title)
    );
    for (row, replica) in plan.replicas.iter().enumerate() {
        draw_replica(&mut out, replica, TOP + ROW * row as f64);
    }
    let mut y = TOP + ROW * plan.replicas.len() as f64 + 8.0;
    if !plan.idle.is_empty() {
        let idle: Vec<&str> = plan.idle.iter().map(|device| device.0.as_str()).collect();
        text(&mut out, (14.0, y + 6.0), "#5b6470", &format!("idle: {}", idle.join(", ")));
        y += 24.0;
    }
    let predicted = &plan.prediction;
    let line = format!(
        "TTFT {:.2} s · TPOT {:.0} ms · wait {:.2} s, longest {:.2} s · objective {}",
        predicted.ttft.0 / 1e3,
        predicted.tpot.0,
        predicted.wait.0 / 1e3,
        predicted.max_wait.0 / 1e3,
        plan.objective
    );
    text(&mut out, (14.0, y + 6.0), "#1f2430", &line);
    out.push_str("</svg>\n");
    out
}

fn colour(role: Role) -> (&'static str, &'static str) {
    match role {
        Role::Prefill => ("#f2b35e", "#a8650c"),
        Role::Decode => ("#7fb2e5", "#1f5f9c"),
        Role::Mixed => ("#9ccf8f", "#3b7a2c"),
    }
}

fn draw_replica(out: &mut String, replica: &ReplicaPlan, y: f64) {
    let (fill, ink) = colour(replica.role);
    let blocks: u32 = replica.stages.iter().map(|stage| stage.layers.len()).sum();
    text(out, (14.0, y + 17.0), ink, &replica.role.to_string());
    let slots = if replica.slots == 1 { "slot" } else { "slots" };
    text(out, (14.0, y + 33.0), "#5b6470", &format!("{} {slots}", replica.slots));
    let busiest = replica.stages.iter().map(|stage| stage.load).fold(0.0, f64::max);
    let mut x = LEFT;
    for (place, stage) in replica.stages.iter().enumerate() {
        let width = BLOCKS * f64::from(stage.layers.len()) / f64::from(blocks.max(1));
        let cpu = width * f64::from(stage.cpu_blocks()) / f64::from(stage.layers.len());
        let outline = if stage.load >= busiest { 2.5 } else { 1.0 };
        rect(out, (x, y), width, (fill, ink, outline));
        if cpu > 0.0 {
            let _ = writeln!(
                out,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{cpu:.1}\" height=\"{BOX}\" rx=\"5\" fill=\"#ffffff\" \
                 fill-opacity=\"0.55\"/>"
            );
        }
        let master = if place + 1 == replica.stages.len() { " ★" } else { "" };
        text(out, (x + 2.0, y + BOX + 14.0), "#1f2430", &format!("{}{master}", stage.device));
        text(out, (x + 6.0, y + 17.0), "#1f2430", &format!("{}–{}", stage.gpu_blocks, stage.cpu_blocks()));
        text(out, (x + 6.0, y + 33.0), "#38404d", &format!("{:.0} %", stage.load * 100.0));
        if place + 1 < replica.stages.len() {
            arrow(out, (x + width, y + BOX / 2.0), stage.encoding);
        }
        x += width + GAP;
    }
    let rate = |name: &str, of: f64| if of > 0.0 { format!("{name} {of:.0} tok/s") } else { String::new() };
    let rates = [rate("prefill", replica.prefill_rate.0), rate("decode", replica.decode_rate.0)];
    for (line, rate) in rates.iter().filter(|rate| !rate.is_empty()).enumerate() {
        text(out, (x - GAP + 12.0, y + 17.0 + 16.0 * line as f64), "#38404d", rate);
    }
}

fn rect(out: &mut String, (x, y): (f64, f64), width: f64, (fill, ink, outline): (&str, &str, f64)) {
    let _ = writeln!(
        out,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{BOX}\" rx=\"5\" fill=\"{fill}\" \
         stroke=\"{ink}\" stroke-width=\"{outline}\"/>"
    );
}

fn arrow(out: &mut String, (x, y): (f64, f64), encoding: LinkEncoding) {
    let end = x + GAP - 2.0;
    let _ = writeln!(
        out,
        "<line x1=\"{:.1}\" y1=\"{y:.1}\" x2=\"{end:.1}\" y2=\"{y:.1}\" stroke=\"#5b6470\" stroke-width=\"1.5\" \
         marker-end=\"url(#tip)\"/>",
        x + 2.0
    );
    let label = match encoding {
        LinkEncoding::F32 => return,
        LinkEncoding::F16 => "f16",
        LinkEncoding::Q8_0 => "q8",
    };
    text(out, (x + 4.0, y - 5.0), "#5b6470", label);
}

fn text(out: &mut String, (x, y): (f64, f64), fill: &str, content: &str) {
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" fill=\"{fill}\">{}</text>", escaped(content));
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
