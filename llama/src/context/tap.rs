//! Takes the hidden rows out of a running graph, and puts rows into graphs that would change them on the way in.
//!
//! ggml's scheduler asks for every node of a graph whether its value is wanted, and then shows it (ggml-backend.cpp,
//! `ggml_backend_sched_compute_splits`). The tap wants the output of the last block, copies it and ends the graph
//! there: the split with that node computes nothing after it, and `llama_decode` still returns 0. Splits that follow
//! on another backend are computed all the same, on whatever the ended one left; nothing reads their result. All
//! that changes a slot's state (KV cache, recurrent state) comes before the output of the last block.
//!
//! Some graphs scale whatever comes in as if it were embedding rows (src/models/gemma2.cpp). A slice of such a model
//! names the node that does it, and the tap writes the given rows over that node's value before anything reads it.

use std::ffi::{CStr, c_void};

use llama_sys as sys;

use crate::batch::{RowInput, Rows};
use crate::{Error, Model, Output};

/// Key of the node whose value the given rows replace.
const INPUT_NODE_KEY: &str = "shoal.slice.input_node";

/// The hidden rows of the calls of one run.
#[derive(Debug)]
pub(crate) struct Tap {
    /// The node whose value is taken, such as `l_out-9`; `None` for logits.
    output: Option<String>,
    /// The node whose value is replaced.
    input: Option<String>,
    n_embd: usize,
    /// `[rows, n_embd]`, call after call.
    taken: Vec<f32>,
    /// Rows that the current call still has to put in, `[rows, n_embd]` from `next` on.
    given: Vec<f32>,
    next: usize,
    /// Why a node could not be used.
    fault: Option<Fault>,
}

#[derive(Debug)]
struct Fault {
    node: String,
    reason: String,
}

impl Tap {
    /// What contexts of `model` need: nothing for logits of an ordinary model.
    pub(crate) fn for_context(model: &Model, output: Output) -> Option<Self> {
        let input = model.metadata(INPUT_NODE_KEY).filter(|node| !node.is_empty());
        let output = match output {
            Output::Hidden => Some(format!("l_out-{}", model.n_layer().saturating_sub(1))),
            Output::Logits => None,
        };
        (input.is_some() || output.is_some()).then(|| Self::new(output, input, model.n_embd() as usize))
    }

    fn new(output: Option<String>, input: Option<String>, n_embd: usize) -> Self {
        Self { output, input, n_embd, taken: Vec::new(), given: Vec::new(), next: 0, fault: None }
    }

    /// The rows taken since [`clear`](Self::clear).
    pub(crate) fn rows(&self) -> &[f32] {
        &self.taken
    }

    /// Forgets all rows, keeping their memory.
    pub(crate) fn clear(&mut self) {
        self.taken.clear();
        self.given.clear();
        self.fault = None;
    }

    /// Prepares for a call with the rows of `order`. llama.cpp computes them in that order, whatever its ubatches.
    pub(crate) fn begin(&mut self, rows: &Rows<'_>, order: &[usize]) {
        self.given.clear();
        self.next = 0;
        // Tokens are looked up, and scaled, by the graph.
        let (Some(_), RowInput::Hidden(hidden)) = (&self.input, rows.input) else { return };
        let width = self.n_embd;
        order.iter().for_each(|row| self.given.extend_from_slice(&hidden[row * width..(row + 1) * width]));
    }

    /// Whether every row was put in, and `expected` were taken since [`clear`](Self::clear).
    pub(crate) fn check(&mut self, expected: usize) -> Result<(), Error> {
        if let Some(Fault { node, reason }) = self.fault.take() {
            return Err(Error::HiddenRows { node, expected, got: self.taken.len() / self.n_embd, reason });
        }
        let reason = || "the architecture may name its nodes differently".to_owned();
        if let Some(node) = self.input.clone().filter(|_| self.next != self.given.len()) {
            let (expected, got) = (self.given.len() / self.n_embd, self.next / self.n_embd);
            return Err(Error::HiddenRows { node, expected, got, reason: reason() });
        }
        match &self.output {
            Some(node) if self.taken.len() != expected * self.n_embd => {
                let got = self.taken.len() / self.n_embd;
                Err(Error::HiddenRows { node: node.clone(), expected, got, reason: reason() })
            }
            _ => Ok(()),
        }
    }

    fn is_output(&self, name: &CStr) -> bool {
        self.output.as_ref().is_some_and(|node| node.as_bytes() == name.to_bytes())
    }

    fn is_input(&self, name: &CStr) -> bool {
        !self.given.is_empty() && self.input.as_ref().is_some_and(|node| node.as_bytes() == name.to_bytes())
    }

    fn take(&mut self, tensor: &sys::ggml_tensor) -> Result<(), String> {
        let size = numbers_of(tensor, self.n_embd)?;
        let start = self.taken.len();
        self.taken.resize(start + size, 0.0);
        let target = self.taken[start..].as_mut_ptr().cast::<c_void>();
        // SAFETY: the tensor is packed f32 of `size` numbers, as checked; the scheduler has synchronised its backend
        // before it calls (ggml-backend.cpp), so the value is there; `target` has room for `size` numbers.
        unsafe { sys::ggml_backend_tensor_get(tensor, target, 0, size * size_of::<f32>()) };
        Ok(())
    }

    fn put(&mut self, tensor: &sys::ggml_tensor) -> Result<(), String> {
        let size = numbers_of(tensor, self.n_embd)?;
        let rest = self.given.get(self.next..self.next + size).ok_or("it has more rows than were given")?;
        let (target, source) = (std::ptr::from_ref(tensor).cast_mut(), rest.as_ptr().cast::<c_void>());
        // SAFETY: the tensor is packed f32 of `size` numbers, as checked, and `rest` has as many. Only its buffer is
        // written, not the struct; the scheduler has synchronised the backend, and starts the nodes that read this one
        // only after the call (ggml-backend.cpp).
        unsafe { sys::ggml_backend_tensor_set(target, source, 0, size * size_of::<f32>()) };
        self.next += size;
        Ok(())
    }

    /// Notes what was wrong with a node. The rows that could not be used are then missing from the count.
    fn note(&mut self, name: &CStr, outcome: Result<(), String>) {
        if let Err(reason) = outcome {
            self.fault = Some(Fault { node: name.to_string_lossy().into_owned(), reason });
        }
    }
}

/// Numbers of a tensor, if it is packed rows of `n_embd` f32.
fn numbers_of(tensor: &sys::ggml_tensor, n_embd: usize) -> Result<usize, String> {
    let [width, rows, ..] = tensor.ne;
    let bytes = size_of::<f32>();
    let expected = [n_embd as i64, rows, 1, 1];
    let packed = tensor.nb[0] == bytes && tensor.nb[1] == bytes * n_embd;
    let Some(count) = usize::try_from(rows).ok().filter(|_| tensor.ne == expected && packed) else {
        let (shape, strides) = (tensor.ne, tensor.nb);
        return Err(format!("it has the shape {shape:?} and strides {strides:?}, not rows of {width}"));
    };
    if tensor.type_ != sys::GGML_TYPE_F32 {
        return Err(format!("its numbers have ggml's type {}, not f32", tensor.type_));
    }
    Ok(count * n_embd)
}

/// For llama.cpp's `cb_eval`, with a `*mut Tap` as user data. Never unwinds: it has no arithmetic that can overflow on
/// a tensor that fits memory, and out of memory aborts.
pub(crate) unsafe extern "C" fn on_node(
    tensor: *mut sys::ggml_tensor,
    ask: bool,
    user_data: *mut c_void,
) -> bool {
    // SAFETY: the context passes its own tap, which nobody else touches while llama.cpp computes, on the thread that
    // called `llama_decode` (ggml-backend.cpp, `compute_splits`); tensor and name live that long.
    let (tap, tensor) = unsafe { (&mut *user_data.cast::<Tap>(), &*tensor) };
    // SAFETY: names are NUL-terminated inside their array (ggml.c, `ggml_set_name`, `ggml_format_name`).
    let name = unsafe { CStr::from_ptr(tensor.name.as_ptr()) };
    let (is_output, is_input) = (tap.is_output(name), tap.is_input(name));
    if ask {
        return is_output || is_input;
    }
    if is_input {
        let outcome = tap.put(tensor);
        tap.note(name, outcome);
    }
    if is_output {
        let outcome = tap.take(tensor);
        tap.note(name, outcome);
    }
    // Ends the graph at the last block, and where it makes no sense to go on.
    !is_output && tap.fault.is_none()
}
