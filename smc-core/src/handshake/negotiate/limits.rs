// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections and links per link group: SMC-R of v2.1, the rule without the transport.

use crate::handshake::decline::DeclineReason;
use crate::wire::ids::LinkLimits;

/// The values a server puts into its Accept: the client's wishes, moved into the range and capped
/// by the server's own (CLCV2-57 to CLCV2-59, D-12).
pub fn negotiate_limits(wished: LinkLimits, own: LinkLimits) -> LinkLimits {
    LinkLimits {
        max_conns: wished.max_conns.min(own.max_conns).max(16),
        max_links: wished.max_links.min(own.max_links).clamp(1, 2),
    }
}

/// Whether a client can live with the final values of an Accept (CLCV2-57, CLCV2-58, CLCV2-85).
///
/// # Errors
///
/// The reason to decline when a value is out of the range of the specification.
pub fn final_limits(accepted: LinkLimits) -> Result<LinkLimits, DeclineReason> {
    if accepted.max_conns < 16 {
        return Err(DeclineReason::MaxConnections(accepted.max_conns));
    }
    if !(1..=2).contains(&accepted.max_links) {
        return Err(DeclineReason::MaxLinks(accepted.max_links));
    }
    Ok(accepted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(max_conns: u8, max_links: u8) -> LinkLimits {
        LinkLimits { max_conns, max_links }
    }

    // Shows: CLCV2-59.
    #[test]
    fn server_moves_wishes_into_the_range_and_under_its_own_limit() {
        let own = limits(32, 2);
        for (wished, expected) in [
            (limits(16, 1), limits(16, 1)),
            (limits(255, 2), limits(32, 2)),
            (limits(0, 0), limits(16, 1)),
            (limits(15, 9), limits(16, 2)),
        ] {
            let chosen = negotiate_limits(wished, own);
            assert_eq!(chosen, expected, "{wished:?}");
            assert!(chosen.in_range());
        }
    }

    // Shows: CLCV2-57, CLCV2-58, CLCV2-85.
    #[test]
    fn client_declines_final_values_out_of_range() {
        assert_eq!(final_limits(limits(16, 1)), Ok(limits(16, 1)));
        assert_eq!(final_limits(limits(15, 1)), Err(DeclineReason::MaxConnections(15)));
        assert_eq!(final_limits(limits(16, 0)), Err(DeclineReason::MaxLinks(0)));
        assert_eq!(final_limits(limits(16, 3)), Err(DeclineReason::MaxLinks(3)));
    }
}
