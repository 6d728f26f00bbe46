// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A filter of peers, in the form of a command line.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::str::FromStr;

use thiserror::Error;

use super::policy::{Network, ports};

/// A filter of peers: `ADDRESS[/BITS][:PORT[-PORT]]`. The address may be `*` for any, and so may the
/// port; an IPv6 address with a port stands in brackets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRule {
    /// `None`: any address.
    network: Option<Network>,
    ports: RangeInclusive<u16>,
}

/// The text is no [`PeerRule`].
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "`{text}` is not of the form ADDRESS[/BITS][:PORT[-PORT]]: {what} is {wrong} (* is any \
     address; an IPv6 address with a port stands in brackets)"
)]
pub struct PeerRuleError {
    text: String,
    wrong: &'static str,
    what: String,
}

const NO_NETWORK: &str = "no address, and no network in which all other bits are 0";
const NO_PORTS: &str = "no port, and no range of ports";

const ALL_PORTS: RangeInclusive<u16> = 0..=u16::MAX;

impl PeerRule {
    /// The rule of all peers.
    pub const ALL: PeerRule = PeerRule { network: None, ports: ALL_PORTS };

    /// The rule without a matching peer.
    #[expect(clippy::reversed_empty_ranges, reason = "an empty range is meant")]
    pub const NONE: PeerRule = PeerRule { network: Some(Network::ALL), ports: 1..=0 };

    /// The rule of all addresses with some ports: `PORT[-PORT]`.
    ///
    /// # Errors
    /// The text is neither a port nor a range of ports.
    pub fn of_ports(text: &str) -> Result<PeerRule, PeerRuleError> {
        let wrong = || PeerRuleError::new(text, text, NO_PORTS);
        Ok(PeerRule { network: None, ports: ports(text).ok_or_else(wrong)? })
    }

    /// Whether the rule is about all addresses.
    pub fn is_everyone(&self) -> bool {
        self.network.is_none()
    }

    /// Whether the rule is about this port.
    pub fn has_port(&self, port: u16) -> bool {
        self.ports.contains(&port)
    }

    /// Whether the rule is about this address and port.
    pub fn matches(&self, ip: IpAddr, port: u16) -> bool {
        self.has_port(port) && self.network.is_none_or(|network| network.contains(Network::of(ip)))
    }
}

impl PeerRuleError {
    fn new(text: &str, what: &str, wrong: &'static str) -> PeerRuleError {
        PeerRuleError { text: text.into(), what: format!("`{what}`"), wrong }
    }
}

impl FromStr for PeerRule {
    type Err = PeerRuleError;

    fn from_str(text: &str) -> Result<PeerRule, PeerRuleError> {
        let colons = text.matches(':').count();
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => match rest.split_once(']') {
                Some((host, "")) => (host, None),
                Some((host, port)) => match port.strip_prefix(':') {
                    Some(port) => (host, Some(port)),
                    None => return Err(PeerRuleError::new(text, port, NO_PORTS)),
                },
                None => return Err(PeerRuleError::new(text, text, NO_NETWORK)),
            },
            None if colons == 1 => text.split_once(':').map_or((text, None), |(h, p)| (h, Some(p))),
            None => (text, None),
        };
        let network = match host {
            "*" | "any" => None,
            host => {
                let wrong = || PeerRuleError::new(text, host, NO_NETWORK);
                Some(Network::parse(host).ok_or_else(wrong)?)
            }
        };
        let ports = match port {
            None | Some("*") => ALL_PORTS,
            Some(port) => ports(port).ok_or_else(|| PeerRuleError::new(text, port, NO_PORTS))?,
        };
        Ok(PeerRule { network, ports })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]
mod tests {
    use super::*;
    use std::net::SocketAddr;

    fn matches(rule: &str, addr: &str) -> bool {
        let addr: SocketAddr = addr.parse().unwrap();
        rule.parse::<PeerRule>().unwrap().matches(addr.ip(), addr.port())
    }

    #[test]
    fn rules_name_networks_and_ports() {
        assert!(matches("*", "10.1.2.3:80"));
        assert!(matches("*:80", "10.1.2.3:80"));
        assert!(matches("10.1.2.3:*", "10.1.2.3:80"));
        assert!(!matches("*:81-90", "10.1.2.3:80"));
        assert!(matches("10.0.0.0/8:70-80", "10.1.2.3:80"));
        assert!(!matches("10.0.0.0/8", "11.1.2.3:80"));
        assert!(matches("10.1.2.3", "10.1.2.3:80"));
        assert!(!matches("10.1.2.3", "10.1.2.4:80"));
        assert!(matches("0.0.0.0/0", "10.1.2.3:80"));
        assert!(matches("[fd00::/8]:80", "[fd01::2]:80"));
        assert!(!matches("[fd00::/8]:81", "[fd01::2]:80"));
        assert!(matches("[fd01::2]", "[fd01::2]:80"));
        assert!(matches("fd00::/8", "[fd01::2]:80"));
        assert!(!matches("fd00::/8", "10.1.2.3:80"));
        assert!(matches("10.0.0.0/8", "[::ffff:10.1.2.3]:80"));
    }

    #[test]
    fn an_error_names_the_rule_and_what_is_wrong_with_it() {
        for (bad, part) in [
            ("10.0.0.0/33", "10.0.0.0/33"),
            ("10.0.0.1/8", "10.0.0.1/8"),
            ("10.0.0.0/8x", "10.0.0.0/8x"),
            ("host:80", "host"),
            ("typo.example", "typo.example"),
            ("foo bar", "foo bar"),
            ("", ""),
            (":80", ""),
            ("*:x", "x"),
            ("*:1-", "1-"),
            ("*:90-80", "90-80"),
            ("*:0", "0"),
            ("*:70000", "70000"),
            ("*:", ""),
            ("[fd00::1]80", "80"),
            ("[fd00::1", "[fd00::1"),
            ("[[fd00::1]]", "]"),
        ] {
            let error = bad.parse::<PeerRule>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("`{bad}` is not of the form ADDRESS")), "{error}");
            assert!(error.contains(&format!(": `{part}` is no ")), "{error}");
        }
        assert!(
            PeerRule::of_ports("70000").unwrap_err().to_string().contains("`70000` is no port")
        );
        assert!(PeerRule::of_ports("*:80").is_err());
    }

    #[test]
    fn the_rules_of_all_and_of_none() {
        let ip = "10.1.2.3".parse().unwrap();
        assert!(PeerRule::ALL.matches(ip, 80) && PeerRule::ALL.is_everyone());
        assert!(!PeerRule::NONE.matches(ip, 80) && !PeerRule::NONE.is_everyone());
        assert!(PeerRule::of_ports("80-90").unwrap().matches(ip, 85));
    }
}
