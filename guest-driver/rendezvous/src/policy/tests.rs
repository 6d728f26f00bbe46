// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use std::path::Path;

use proptest::prelude::*;

use super::*;

fn policy(text: &str) -> Policy {
    Policy::parse(text).unwrap()
}

fn connect(policy: &Policy, server: &str) -> AllowedProtocol {
    policy.connect(&server.parse().unwrap())
}

/// The answer to a client in a listener's table.
fn answer(clients: &Clients, client: IpAddr) -> AllowedProtocol {
    let client = Network::of(client);
    let fitting = clients.iter().filter(|(network, _)| network.contains(client));
    fitting.max_by_key(|(network, _)| network.length).unwrap().1
}

#[test]
fn without_rules_everybody_may_speak_smc() {
    for policy in [Policy::default(), policy("")] {
        assert_eq!(connect(&policy, "192.0.2.1:80"), AllowedProtocol::Smc);
        assert_eq!(policy.listen(80, None), [(Network::ALL, AllowedProtocol::Smc)]);
        assert!(!policy.depends_on_client());
    }
}

#[test]
fn the_first_rule_that_fits_decides() {
    let policy = policy(
        "default = 'tcp'
         [[rule]]
         use = 'tcp'
         peers = ['10.1.2.3']
         [[rule]]
         use = 'smc'
         peers = ['10.1.0.0/16', 'fd00::/8']
         ports = [6379, '8000-8999']",
    );
    assert_eq!(connect(&policy, "10.1.2.3:6379"), AllowedProtocol::Tcp);
    assert_eq!(connect(&policy, "10.1.2.4:6379"), AllowedProtocol::Smc);
    assert_eq!(connect(&policy, "10.1.2.4:6380"), AllowedProtocol::Tcp);
    assert_eq!(connect(&policy, "10.1.2.4:8999"), AllowedProtocol::Smc);
    assert_eq!(connect(&policy, "10.2.2.4:8999"), AllowedProtocol::Tcp);
    assert_eq!(connect(&policy, "[fd12::1]:8000"), AllowedProtocol::Smc);
    assert_eq!(connect(&policy, "[::ffff:10.1.9.9]:8000"), AllowedProtocol::Smc);
    let clients = policy.listen(8000, None);
    assert_eq!(answer(&clients, "10.1.2.3".parse().unwrap()), AllowedProtocol::Tcp);
    assert_eq!(answer(&clients, "10.1.2.4".parse().unwrap()), AllowedProtocol::Smc);
    assert_eq!(answer(&clients, "10.2.2.4".parse().unwrap()), AllowedProtocol::Tcp);
    assert!(policy.depends_on_client());
}

#[test]
fn a_rule_may_be_of_users_and_cgroups() {
    let own = rustix::process::geteuid().as_raw();
    let name = std::fs::read_to_string("/etc/passwd").unwrap();
    let has_root = name.lines().any(|line| line.starts_with("root:"));
    let root = if has_root { "'root', " } else { "" };
    let rule = |users: &str| policy(&format!("[[rule]]\nuse = 'tcp'\nusers = [{users}]"));
    assert_eq!(connect(&rule(&format!("{root}{own}")), "10.0.0.1:1"), AllowedProtocol::Tcp);
    assert_eq!(connect(&rule(&(own + 1).to_string()), "10.0.0.1:1"), AllowedProtocol::Smc);
    let text = "4:memory:/other.service\n1:name=systemd:/system.slice/a.service\n0::/one/b.scope\n";
    for (cgroup, fits) in [
        ("a.service", true),
        ("b.scope", true),
        ("one", true),
        ("/system.slice", true),
        ("/system.slice/", true),
        ("/", true),
        ("/system.slice/a.service", true),
        ("/system", false),
        ("/a.service", false),
        ("a", false),
        ("other.service", false),
    ] {
        let policy = policy(&format!("[[rule]]\nuse = 'tcp'\ncgroups = ['none', '{cgroup}']"));
        let policy = policy.of_cgroups(&paths_of_cgroups(text));
        let says = connect(&policy, "10.0.0.1:1") == AllowedProtocol::Tcp;
        assert_eq!(says, fits, "{cgroup}");
    }
}

#[test]
fn a_share_is_a_clients() {
    let to = "10.0.0.1:6379".parse().unwrap();
    let policy = |share| {
        policy(&format!(
            "[[rule]]\nuse = 'smc'\nwhen = 'connect'\nports = [6379]\nshare = '{share}'"
        ))
    };
    let all = |share, choice| (0..100).all(|_| policy(share).choose(&to) == choice);
    assert!(all("0%", PolicyChoice::OutsideShare) && all("100%", PolicyChoice::Smc));
    let half: Vec<_> = (0..200).map(|_| policy("50%").choose(&to)).collect();
    assert!(half.contains(&PolicyChoice::Smc) && half.contains(&PolicyChoice::OutsideShare));
    assert_eq!(policy("0%").choose(&"10.0.0.1:80".parse().unwrap()), PolicyChoice::Smc);
    assert_eq!(policy("0%").accept(to.ip(), 6379), AllowedProtocol::Smc);
    assert_eq!(
        policy("7.5%").shares().map(|share| share.to_string()).collect::<Vec<_>>(),
        ["7.50%"]
    );
}

/// The answers for networks of an earlier policy are replaced, too.
#[test]
fn a_changed_policy_answers_for_the_networks_of_the_one_before() {
    let before = policy("[[rule]]\nuse = 'tcp'\npeers = ['10.1.0.0/16']");
    let now = policy("[[rule]]\nuse = 'tcp'\npeers = ['10.2.0.0/16']");
    let clients = now.listen(80, Some(&before));
    let says = |client: &str| {
        let network = Network::parse(client).unwrap();
        clients.iter().find(|(known, _)| *known == network).map(|(_, allowed)| *allowed)
    };
    assert_eq!(says("10.1.0.0/16"), Some(AllowedProtocol::Smc));
    assert_eq!(says("10.2.0.0/16"), Some(AllowedProtocol::Tcp));
}

#[test]
fn a_rule_may_count_on_one_side_only() {
    let policy = policy(
        "[[rule]]
         use = 'tcp'
         when = 'connect'
         peers = ['0.0.0.0/0']
         [[rule]]
         use = 'tcp'
         when = 'listen'
         ports = [443]",
    );
    assert_eq!(connect(&policy, "192.0.2.1:443"), AllowedProtocol::Tcp);
    assert_eq!(connect(&policy, "[2001:db8::1]:443"), AllowedProtocol::Smc);
    assert_eq!(policy.listen(443, None), [(Network::ALL, AllowedProtocol::Tcp)]);
    assert_eq!(policy.listen(444, None), [(Network::ALL, AllowedProtocol::Smc)]);
    assert!(!policy.depends_on_client());
}

#[test]
fn a_rule_may_name_programs() {
    let text = "
        [[rule]]
        use = 'tcp'
        programs = ['redis-server', '/opt/bin/tool']";
    let decides =
        |executable: &str| connect(&policy(text).of_program(Path::new(executable)), "192.0.2.1:1");
    assert_eq!(decides("/usr/bin/redis-server"), AllowedProtocol::Tcp);
    assert_eq!(decides("/usr/bin/redis-server (deleted)"), AllowedProtocol::Tcp);
    assert_eq!(decides("/opt/bin/tool"), AllowedProtocol::Tcp);
    assert_eq!(decides("/usr/bin/tool"), AllowedProtocol::Smc);
    assert_eq!(decides("/usr/bin/redis"), AllowedProtocol::Smc);
}

#[test]
fn a_rule_with_a_key_of_a_later_release_is_tcp_and_says_so() {
    let text = "later = 1\n[[rule]]\nuse = 'smc'\nwhen = 'connect'\nports = [1]\nshare = '5%'\n\
                hosts = ['a']\n[[rule]]\nuse = 'always-smc'\nports = [2]";
    let read = policy(text);
    // No connection is on SMC without the key or the share, and other rules are as they were.
    assert_eq!(connect(&read, "192.0.2.1:1"), AllowedProtocol::Tcp);
    assert_eq!(connect(&read, "192.0.2.1:2"), AllowedProtocol::AlwaysSmc);
    assert_eq!(connect(&read, "192.0.2.1:3"), AllowedProtocol::Smc);
    assert_eq!(read.shares().count(), 0);
    let said: Vec<String> = read.unknown().iter().map(ToString::to_string).collect();
    assert_eq!(said[0], "the key \"later\" is unknown, and without effect");
    assert!(said[1].starts_with("rule 1: the key \"hosts\" is unknown, so all"), "{said:?}");
    assert_eq!(said.len(), 2);
    // Another mistake beside the key is still a mistake, with its line.
    let error = Policy::parse("later = 1\n[[rule]]\nuse = 'tpc'").unwrap_err().to_string();
    assert!(error.contains("unknown variant `tpc`"), "{error}");
    assert!(policy("[[rule]]\nuse = 'tcp'").unknown().is_empty());
}

#[test]
fn refuses_what_it_does_not_understand() {
    for (text, expected) in [
        ("default = 'rdma'", "unknown variant `rdma`"),
        ("[[rule]]\nports = [1]", "missing field `use`"),
        ("[[rule]]\nuse = 'tcp'\nwhen = 'always'", "unknown variant `always`"),
        ("[[rule]]\nuse = 'tcp'\npeers = ['10.0.0.1/8']", "`10.0.0.1/8` is no address"),
        ("[[rule]]\nuse = 'tcp'\npeers = ['10.0.0.0/33']", "`10.0.0.0/33` is no address"),
        ("[[rule]]\nuse = 'tcp'\npeers = ['::/129']", "`::/129` is no address"),
        ("[[rule]]\nuse = 'tcp'\npeers = ['example.org']", "`example.org` is no address"),
        ("[[rule]]\nuse = 'tcp'\n[[rule]]\nuse = 'tcp'\nports = [65536]", "rule 2: `65536` is no"),
        ("[[rule]]\nuse = 'tcp'\nports = [0]", "`0` is no port"),
        ("[[rule]]\nuse = 'tcp'\nports = ['9-8']", "`9-8` is no port"),
        ("[[rule]]\nuse = 'tcp'\nports = []", "`ports` is empty"),
        ("[[rule]]\nuse = 'tcp'\nprograms = []", "`programs` is empty"),
        ("[[rule]]\nuse = 'tcp'\nusers = []", "`users` is empty"),
        ("[[rule]]\nuse = 'tcp'\nusers = ['no such user']", "there is no user \"no such user\""),
        ("[[rule]]\nuse = 'tcp'\nusers = [-1]", "expected the number or name of a user"),
        ("[[rule]]\nuse = 'smc'\nwhen = 'connect'\nshare = '101%'", "`101%` is no share"),
        ("[[rule]]\nuse = 'tcp'\nwhen = 'connect'\nshare = '5%'", "rule 1: a share needs"),
        ("[[rule]]\nuse = 'smc'\nshare = '5%'", "rule 1: a share needs"),
    ] {
        let error = Policy::parse(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn refuses_more_than_it_can_hold() {
    let rules = "[[rule]]\nuse = 'tcp'\n".repeat(MAX_RULES + 1);
    assert!(matches!(Policy::parse(&rules), Err(PolicyError::TooMany { what: "rules", .. })));
    let networks = "'::1',".repeat(MAX_NETWORKS + 1);
    let rule = format!("[[rule]]\nuse = 'tcp'\npeers = [{networks}]");
    assert!(matches!(Policy::parse(&rule), Err(PolicyError::TooMany { what: "networks", .. })));
}

#[test]
fn names_the_file_that_cannot_be_read() {
    let error = Policy::load(Path::new("/no/such/policy.toml")).unwrap_err().to_string();
    assert!(error.starts_with("/no/such/policy.toml: No such file"), "{error}");
    // Endless, or of another kind.
    for path in ["/dev/zero", "/dev/null", "/tmp"] {
        let error = Policy::load(Path::new(path)).unwrap_err().to_string();
        assert_eq!(error, format!("{path}: it is no regular file"));
    }
}

/// Often nested networks.
fn network() -> impl Strategy<Value = Network> {
    (0u8..=4, any::<u8>()).prop_map(|(length, bits)| {
        let network = Network { start: u128::from(bits & 15) << 124, length };
        Network { start: network.start & network.mask(), ..network }
    })
}

proptest! {
    /// The longest prefix of a listener's table agrees with the first fitting rule.
    #[test]
    fn tables_say_what_rules_say(
        rules in prop::collection::vec(
            (any::<bool>(), prop::collection::vec(network(), 0..4)), 0..6),
        client: u8,
    ) {
        let rules = rules.into_iter().map(|(smc, peers)| Rule {
            users: Vec::new(),
            cgroups: Vec::new(),
            share: None,
            allowed: if smc { AllowedProtocol::Smc } else { AllowedProtocol::Tcp },
            side: None,
            peers,
            ports: Vec::new(),
            programs: Vec::new(),
        });
        let policy = Policy { rules: rules.collect(), ..Policy::none() };
        let client = Ipv6Addr::from_bits(u128::from(client & 15) << 124);
        prop_assert_eq!(
            answer(&policy.listen(1, None), client.into()),
            policy.connect(&SocketAddr::new(client.into(), 1))
        );
    }
}

#[test]
fn a_rule_names_the_link_or_its_executable() {
    let text = "default = 'smc'\n[[rule]]\nuse = 'tcp'\nprograms = ['bun', '/opt/run']";
    let of = |executable: &str, started_as: &str| {
        let all = policy(text);
        let own = all.of_program_started_as(Path::new(executable), Path::new(started_as));
        connect(&own, "192.0.2.1:1")
    };
    for (executable, started_as, expected) in [
        ("/opt/bun.exe", "/usr/bin/bun", AllowedProtocol::Tcp),
        ("/usr/bin/bun", "/tmp/other", AllowedProtocol::Tcp),
        ("/usr/bin/python3", "/opt/run", AllowedProtocol::Tcp),
        ("/opt/bun.exe", "/opt/bun.exe", AllowedProtocol::Smc),
    ] {
        assert_eq!(of(executable, started_as), expected, "{executable} as {started_as}");
    }
}
