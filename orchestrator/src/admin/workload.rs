//! `/admin/v1/workload`: what is asked for, as it was counted over the last minutes, and what is made of it.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use cluster::{Demand, DemandLevel};
use serde::Serialize;

use crate::app::App;
use crate::demand::Adaptation;

/// The answer.
#[derive(Serialize)]
pub(super) struct WorkloadView {
    object: &'static str,
    /// Windows are per model; this process serves one.
    model: String,
    /// Over how long it is counted.
    window_s: f64,
    #[serde(flatten)]
    level: DemandLevel,
    counted: Demand,
    /// Requests that wait for a slot, and those with their first token that wait for one elsewhere.
    waiting: usize,
    waiting_to_decode: usize,
    /// Nothing where nobody looks at it.
    adaptation: Option<Adaptation>,
}

/// `GET /admin/v1/workload`.
pub(super) async fn now(State(app): State<Arc<App>>) -> Json<WorkloadView> {
    let (window, counted) = app.fleet.meter().demand();
    let queue = app.fleet.dispatch().queue();
    Json(WorkloadView {
        object: "workload",
        model: app.model_name.to_string(),
        window_s: window.as_secs_f64(),
        level: counted.level(),
        counted,
        waiting: queue.waiting,
        waiting_to_decode: queue.waiting_to_decode,
        adaptation: app.fleet.meter().adaptation(),
    })
}
