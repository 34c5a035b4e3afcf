//! Makes the frame that the schedule chose, and keeps the slots' records in step with it.
//!
//! It chooses nothing itself.

use cluster::{SlotId, StepId};
use protocol::frame::RowRun;

use super::events::EventSink;
use super::frame::{FrameKind, FrameMemory, StepFrame};
use super::running::Running;
use super::sampling::Sample;
use super::schedule::{FewSlots, Pick, Share};
use super::slot::Slot;
use super::steps::OutputRow;

/// The frame of this pick, in the memory of an earlier one, and its rows that someone waits for: every decode row, and a
/// prompt's last.
pub(super) fn frame<M: Sample, E: EventSink>(
    step: StepId,
    pick: &Pick,
    slots: &mut [Slot<Running<M, E>>],
    memory: FrameMemory,
) -> (StepFrame, FewSlots<OutputRow>) {
    match pick {
        Pick::Decode(ready) => {
            let mut frame = StepFrame::new(step, FrameKind::Decode, memory);
            let outputs = ready.iter().map(|id| decode_row(&mut frame, slots, *id)).collect();
            (frame, outputs)
        }
        Pick::Prefill(shares) => {
            let mut frame = StepFrame::new(step, FrameKind::Prefill, memory);
            let outputs = shares.iter().filter_map(|share| prompt_rows(&mut frame, slots, *share)).collect();
            (frame, outputs)
        }
    }
}

fn decode_row<M: Sample, E: EventSink>(
    frame: &mut StepFrame,
    slots: &mut [Slot<Running<M, E>>],
    id: SlotId,
) -> OutputRow {
    let slot = &mut slots[id.0 as usize];
    let Some(running) = &mut slot.running else { unreachable!("{id} is ready, so it runs") };
    let (position, token) = running.send_token();
    // What lets stages run any waiting decode frames as one batch.
    assert_eq!(slot.cache.len(), position, "{id}: a decode row removes nothing");
    let removed = slot.cache.write(position, &[token]);
    assert_eq!(removed, None, "{id}: a decode row removes nothing");
    let run = RowRun { slot: id, position: position as u32, n: 1 };
    OutputRow { row: frame.push(run, None, &[token]), slot: id, key: running.key() }
}

fn prompt_rows<M: Sample, E: EventSink>(
    frame: &mut StepFrame,
    slots: &mut [Slot<Running<M, E>>],
    Share { slot: id, rows }: Share,
) -> Option<OutputRow> {
    let slot = &mut slots[id.0 as usize];
    let Some(running) = &mut slot.running else { unreachable!("{id} is in prefill, so it runs") };
    let key = running.key();
    let (position, tokens) = running.send_prompt(rows);
    // A request's first rows may land on what an earlier one left beyond the common prefix.
    let removed = slot.cache.write(position, tokens);
    let run = RowRun { slot: id, position: position as u32, n: rows as u32 };
    let row = frame.push(run, removed, tokens);
    if running.unsent() > 0 {
        return None;
    }
    if running.will_be_held() {
        frame.copies.push(id);
    }
    Some(OutputRow { row, slot: id, key })
}
