// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A Decline from either end, and its effect on the connection.

use std::net::TcpStream;

use smc_core::handshake::{AfterDecline, DeclineReason, SendDecline};

use super::tcp::{has_ended, send};
use super::{Broken, Outcome};
use virtio_ism::IsmError;
use virtio_ism::virtqueue::QueueError;

/// Sends a Decline. The connection continues as TCP, or is broken, as the Decline demands.
///
/// A peer with its direction ended awaits no answer: it has closed the connection. Its machine would
/// answer the Decline with a reset, where a program on TCP reads an end of data.
pub(super) fn send_decline(tcp: &TcpStream, decline: SendDecline) -> Result<Outcome, Broken> {
    let is_awaited = !has_ended(tcp);
    if is_awaited {
        send(tcp, &decline.message)?;
    }
    match decline.then {
        AfterDecline::FallBack => Ok(Outcome::Tcp(decline.fallback().into())),
        AfterDecline::Break if is_awaited => Err(Broken::Declined(decline.reason)),
        AfterDecline::Break => Err(Broken::Late(decline.reason)),
    }
}

/// The reason in a Decline for a failure of the virtio-ism device.
pub(super) fn device_decline_reason(error: &IsmError) -> DeclineReason {
    use virtio_ism_abi::Status;
    tracing::debug!(%error, "no buffer for a connection");
    match error {
        IsmError::NoIndex { .. } => DeclineReason::NoDmb,
        IsmError::Refused { status: Status::Enospc, .. } => DeclineReason::NoDmb,
        IsmError::Refused { status: Status::Estate, .. } => DeclineReason::Drained,
        IsmError::Refused { status: Status::Enomem, .. } => DeclineReason::NoMemory,
        IsmError::Refused { status: Status::Enodev, .. } => DeclineReason::Unreachable,
        IsmError::Refused { status: Status::Eorder, .. } => DeclineReason::ByteOrder,
        IsmError::Queue(QueueError::Gone) => DeclineReason::DeviceGone,
        IsmError::Queue(QueueError::Timeout { .. }) => DeclineReason::NoAnswer,
        error if error.is_out_of_memory() => DeclineReason::NoMemory,
        _ => DeclineReason::Registration,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

    use virtio_ism_abi::Status;
    use virtio_ism_abi::command::Op;

    use super::*;

    #[test]
    fn each_failure_of_a_device_has_its_own_reason() {
        let refused = |status| IsmError::Refused { op: Op::Attach, status };
        let failures = [
            refused(Status::Enospc),
            refused(Status::Estate),
            refused(Status::Enomem),
            refused(Status::Enodev),
            refused(Status::Eorder),
            refused(Status::Einval),
            QueueError::Gone.into(),
            QueueError::Timeout { what: "ATTACH", after: Duration::from_secs(5) }.into(),
        ];
        let reasons: HashSet<_> = failures.iter().map(device_decline_reason).collect();
        assert_eq!(reasons.len(), failures.len(), "{reasons:?}");
        let says: HashSet<_> = reasons.iter().map(ToString::to_string).collect();
        assert_eq!(says.len(), failures.len(), "{says:?}");
        assert!(reasons.contains(&DeclineReason::NoAnswer));
    }
}
