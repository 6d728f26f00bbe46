// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Inline delivery: the thread of another device puts events into a device's event queue and has the kernel
//! signal the driver. This spares the owner's worker.

use std::sync::{Arc, Mutex, OnceLock};

use super::chain::Chain;
use super::notifier::Notifier;
use ism_device::shm::Kicker;
use ism_device::sync::lock;
use ism_device::{Delivery, EventNotifier};

/// Notifies a device of its events: inline if the caller may and no thread works on the event queue,
/// otherwise by the notifier of the device's own worker.
pub(super) struct InlineDelivery {
    notifier: Arc<Notifier>,
    deliver: OnceLock<Box<Deliver>>,
    on_slow_memory: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// Delivers the events of a device from a thread of another device, without ever waiting. `false`: not
/// possible, leave delivery to the device's own worker.
type Deliver = dyn Fn() -> bool + Send + Sync;

impl InlineDelivery {
    pub(super) fn new(notifier: Arc<Notifier>) -> InlineDelivery {
        InlineDelivery { notifier, deliver: OnceLock::new(), on_slow_memory: OnceLock::new() }
    }

    /// Sets the call for a peer's wait for the device's memory; once.
    pub(super) fn set_on_slow_memory(&self, call: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_slow_memory.set(Box::new(call));
    }

    /// Sets the function for inline delivery; once. Until then the worker delivers events.
    pub(super) fn set(&self, deliver: impl Fn() -> bool + Send + Sync + 'static) {
        let _ = self.deliver.set(Box::new(deliver));
    }
}

impl EventNotifier for InlineDelivery {
    fn notify(&self, delivery: Delivery) {
        let inline = match delivery {
            Delivery::Deferred => None,
            Delivery::Inline => self.deliver.get(),
        };
        if !inline.is_some_and(|deliver| deliver()) {
            self.notifier.notify();
        }
    }

    fn memory_was_slow(&self) {
        if let Some(call) = self.on_slow_memory.get() {
            call();
        }
    }
}

/// Buffers for delivering events of another device.
pub(super) struct InlineContext {
    pub(super) chain: Chain,
    pub(super) kicker: Kicker,
}

/// The contexts, shared by all threads: a large host has few contexts of asynchronous IO. With all contexts
/// in use, a thread notifies the worker instead.
static CONTEXTS: [Mutex<Option<InlineContext>>; 4] = [const { Mutex::new(None) }; 4];

/// Makes the contexts. Without effect on a kernel without asynchronous IO.
pub(super) fn prepare() {
    for slot in &CONTEXTS {
        let mut context = lock(slot);
        if context.is_none() {
            match Kicker::new() {
                Ok(kicker) => *context = Some(InlineContext { chain: Chain::default(), kicker }),
                Err(error) => {
                    tracing::debug!(%error, "no asynchronous IO: workers deliver all events");
                }
            }
        }
    }
}

/// Calls `work` with a free context. `false`: no context is free, or `work` returned `false`.
pub(super) fn with_context(work: impl FnOnce(&mut InlineContext) -> bool) -> bool {
    for slot in &CONTEXTS {
        if let Ok(mut context) = slot.try_lock() {
            return context.as_mut().is_some_and(work);
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_notified(delivery: Delivery, deliver: Option<bool>) -> bool {
        let notifier = Arc::new(Notifier::new().unwrap());
        let inline = InlineDelivery::new(notifier.clone());
        if let Some(delivers) = deliver {
            inline.set(move || delivers);
        }
        inline.notify(delivery);
        notifier.is_notified()
    }

    #[test]
    fn the_worker_is_notified_only_if_no_event_was_delivered_inline() {
        assert!(!is_notified(Delivery::Inline, Some(true)));
        assert!(is_notified(Delivery::Inline, Some(false)));
        assert!(is_notified(Delivery::Inline, None), "before there is a connection");
    }

    #[test]
    fn a_caller_that_may_hold_locks_delivers_nothing() {
        assert!(is_notified(Delivery::Deferred, Some(true)));
    }
}
