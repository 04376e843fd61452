// Runs one exchange with franz-go: an admin client creates a topic, a producer writes records, and a
// consumer of a group reads them. Argument: a JSON file with the settings below. With three arguments, an
// address, a job and a timeout, it runs the job of faults.go; with four, the role of failover.go.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

type settings struct {
	Address     string
	CAFile      string
	Certificate string // PEM file with a certificate and its key, or empty
	Mechanism   string // empty without SASL
	User        string
	Password    string
	Token       string
	Topic       string
	Group       string
	Values      []string
}

func (s settings) options() ([]kgo.Opt, error) {
	authorities, err := os.ReadFile(s.CAFile)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool()}
	if !config.RootCAs.AppendCertsFromPEM(authorities) {
		return nil, errors.New("the file of authorities has no certificate")
	}
	if s.Certificate != "" {
		pair, err := tls.LoadX509KeyPair(s.Certificate, s.Certificate)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	options := []kgo.Opt{kgo.SeedBrokers(s.Address), kgo.DialTLSConfig(config)}
	password := scram.Auth{User: s.User, Pass: s.Password}
	switch s.Mechanism {
	case "":
	case "PLAIN":
		options = append(options, kgo.SASL(plain.Auth{User: s.User, Pass: s.Password}.AsMechanism()))
	case "SCRAM-SHA-256":
		options = append(options, kgo.SASL(password.AsSha256Mechanism()))
	case "SCRAM-SHA-512":
		options = append(options, kgo.SASL(password.AsSha512Mechanism()))
	case "OAUTHBEARER":
		options = append(options, kgo.SASL(oauth.Auth{Token: s.Token}.AsMechanism()))
	default:
		return nil, fmt.Errorf("unknown mechanism %q", s.Mechanism)
	}
	return options, nil
}

func run(ctx context.Context, s settings) error {
	options, err := s.options()
	if err != nil {
		return err
	}
	client, err := kgo.NewClient(options...)
	if err != nil {
		return err
	}
	defer client.Close()
	if err := client.Ping(ctx); err != nil {
		return err
	}
	if _, err := kadm.NewClient(client).CreateTopic(ctx, 1, 1, nil, s.Topic); err != nil {
		return err
	}
	for _, value := range s.Values {
		record := &kgo.Record{Topic: s.Topic, Value: []byte(value)}
		if err := client.ProduceSync(ctx, record).FirstErr(); err != nil {
			return err
		}
	}
	options = append(
		options, kgo.ConsumerGroup(s.Group), kgo.ConsumeTopics(s.Topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
	)
	consumer, err := kgo.NewClient(options...)
	if err != nil {
		return err
	}
	defer consumer.Close()
	for found := 0; found < len(s.Values); {
		fetches := consumer.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return err
		}
		fetches.EachRecord(func(record *kgo.Record) {
			fmt.Println(string(record.Value))
			found++
		})
	}
	return consumer.CommitUncommittedOffsets(ctx)
}

func main() {
	if len(os.Args) == 5 {
		if err := runFailover(os.Args[1], os.Args[2], os.Args[3], os.Args[4]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) == 4 {
		requestTimeout, err := time.ParseDuration(os.Args[3] + "ms")
		if err != nil {
			panic(err)
		}
		runFaulted(os.Args[1], os.Args[2], requestTimeout)
		return
	}
	text, err := os.ReadFile(os.Args[1])
	var s settings
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		err = run(ctx, s)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
